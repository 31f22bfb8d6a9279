"""Measures steps on text alone, engine and trainer, of two source trees by turns in processes of their own.

    python -m benchmarks.text_steps --before ../earlier --after . --rounds 5

Prints processor seconds of each tree's steps, and the median of the ratios of the rounds. The model is
``models/tiny-addition``: with so small a model, what surrounds its forward pass weighs most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

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

_CHILD = "--measure"
ENGINE_STEPS, TRAINER_STEPS = 400, 40


def measure(model: Path) -> dict[str, float]:
    """Processor seconds of decode steps of 64 rows, and of train steps on 16 groups of 16 samples."""
    torch.set_num_threads(1)
    loaded = load_model(model, torch.float32, "cpu", trust_remote_code=False)
    engine = EmbeddedEngine(
        loaded,
        name="engine",
        incarnation="one",
        eos_token_ids=(),
        max_sequences=64,
        max_model_len=512,
        deterministic=False,
        seed=0,
        device="cpu",
    )
    number = 0

    def step_engine() -> None:
        nonlocal number
        while engine.running + 16 * engine.waiting < 64:
            sampling = SamplingParams(max_new_tokens=8, seed=number)
            engine.submit(GenerateRequest(f"r{number}", (5, 6, 7, 8), 16, sampling))
            number += 1
        engine.step()

    rng = np.random.default_rng(0)
    groups = [
        {
            "prompt_ids": rng.integers(4, 90, 6, dtype=np.int32),
            "response_ids": rng.integers(4, 90, 64, dtype=np.int32),
            "response_offsets": np.arange(0, 65, 4, dtype=np.int64),
            "loss_mask": np.ones(64, np.bool_),
            "generation_logprobs": np.full(64, -4.0, np.float32),
            "weight_versions": np.zeros(64, np.int32),
            "rewards": np.zeros(16, np.float32),
        }
        for _ in range(16)
    ]
    advantages = [tuple(rng.normal(0, 1, 16).tolist()) for _ in groups]
    trainer = TorchTrainer(
        model,
        trainer=TorchTrainerConfig(),
        model=ModelConfig(path=str(model), dtype="float32"),
        total_steps=1000,
        max_model_len=512,
    )
    seconds = dict[str, float]()
    for name, steps, step in (
        ("engine", ENGINE_STEPS, step_engine),
        (
            "trainer",
            TRAINER_STEPS,
            lambda: trainer.train(build_chunk(groups), advantages, LossSpec()),
        ),
    ):
        for _ in range(5):
            step()
        began_s = time.process_time()
        for _ in range(steps):
            step()
        seconds[name] = (time.process_time() - began_s) / steps
    return seconds


def in_tree(tree: Path, model: Path) -> dict[str, float]:
    """Measure in a process that imports the package of ``tree``."""
    ran = subprocess.run(
        [sys.executable, __file__, _CHILD, str(model)],
        env={**os.environ, "PYTHONPATH": str(tree.resolve())},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Run the rounds, or one measurement in a child."""
    parser = argparse.ArgumentParser(description="Compare text-only steps of two source trees.")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=Path())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(_CHILD, type=Path)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure)))
        return
    model = (arguments.after / "models/tiny-addition").resolve()
    ratios: dict[str, list[float]] = {"engine": [], "trainer": []}
    for _ in range(arguments.rounds):
        before, after = (in_tree(each, model) for each in (arguments.before, arguments.after))
        for name, values in ratios.items():
            values.append(after[name] / before[name])
        print(json.dumps({"before": before, "after": after}), flush=True)
    print(json.dumps({name: round(statistics.median(each), 3) for name, each in ratios.items()}))


if __name__ == "__main__":
    main()
