"""Measures the cost of a release's canary, beside a step of the quickstart: CPU time of one thread.

    python -m benchmarks.canary

Sides are run in turn in one process, on the quickstart's model and batch: a step of the trainer and
the samples of it in the embedded engine, then the canary at both ends. Controller and environment
worker are left out of the step, so the share is an upper bound. Medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.messages.generation import GenerateRequest, SamplingParams
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from offbeat.weight_sync import canary

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-addition"
GROUPS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 16, 6, 4


def group(dice: np.random.Generator) -> dict[str, Any]:
    """A group as the environment worker packs it."""
    tokens = SAMPLES * NEW_TOKENS
    return {
        "prompt_ids": dice.integers(2, 100, PROMPT_TOKENS, dtype=np.int32),
        "response_ids": dice.integers(2, 100, tokens, dtype=np.int32),
        "response_offsets": np.arange(0, tokens + 1, NEW_TOKENS, dtype=np.int64),
        "loss_mask": np.ones(tokens, np.bool_),
        "generation_logprobs": np.full(tokens, -1.0, np.float32),
        "weight_versions": np.zeros(tokens, np.int32),
        "rewards": np.zeros(SAMPLES, np.float32),
    }


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU time of this process that the work takes."""
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3


def main() -> None:
    """Measure in turn, print medians and shares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = ModelConfig(path=str(MODEL))
    trainer = TorchTrainer(
        MODEL, trainer=TorchTrainerConfig(), model=model, total_steps=10_000, max_model_len=64
    )
    engine = EmbeddedEngine(
        load_model(MODEL, torch.float32, "cpu", trust_remote_code=False),
        name="generator-0",
        incarnation="incarnation",
        eos_token_ids=[],
        max_sequences=256,
        max_model_len=64,
        deterministic=False,
        seed=0,
        device="cpu",
    )
    dice = np.random.default_rng(0)
    groups = [group(dice) for _ in range(GROUPS)]
    advantages = [tuple(dice.normal(size=SAMPLES).tolist()) for _ in range(GROUPS)]
    sampling = SamplingParams(1.0, 1.0, NEW_TOKENS, (), 1)
    asked, requests = canary.prompts(trainer.vocabulary), 0

    def sample() -> None:
        nonlocal requests
        for each in groups:
            requests += 1
            prompt = tuple(each["prompt_ids"].tolist())
            engine.submit(GenerateRequest(str(requests), prompt, SAMPLES, sampling))
        while engine.has_work:
            engine.step()

    sides: dict[str, Callable[[], object]] = {
        "step, trainer": lambda: trainer.train(build_chunk(groups), advantages, LossSpec()),
        "step, engine": sample,
        "canary, trainer": lambda: trainer.top_logprobs(asked, canary.KEPT),
        "canary, engine": lambda: engine.greedy(asked),
    }
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            figures[name].append(cpu_ms(work))
    medians = {name: statistics.median(each[5:]) for name, each in figures.items()}
    for name, median in medians.items():
        print(f"{name:16} {median:6.2f} ms")
    step = medians["step, trainer"] + medians["step, engine"]
    extra = medians["canary, trainer"] + medians["canary, engine"]
    for interval in (1, 2, 4, 8):
        print(f"canary_interval={interval}: {extra / interval / step:.1%} of a step")


if __name__ == "__main__":
    main()
