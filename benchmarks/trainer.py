"""Time of a train step of a tiny model on one thread, with prompts packed once a group and without.

    OMP_NUM_THREADS=1 python benchmarks/trainer.py [--steps N]

A step is begin, one chunk of 16 groups of 16 samples, finish. Medians; tokens are prompt and response
tokens over all samples, as if no prompt were shared.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from offbeat.actors.trainers.torch_backend import TorchTrainer
from offbeat.config.run import ModelConfig
from offbeat.config.training import OptimizerConfig, TrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.messages.training import LossSpec
from offbeat.transfer_queue.schema import Columns

GROUPS, SAMPLES, PROMPT_TOKENS, WARMUP = 16, 16, 6, 3


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    steps, device = (arguments := parser.parse_args()).steps, arguments.device
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        _make_model(Path(directory))
        for response_tokens in (3, 64):
            groups, advantages = _batch(response_tokens)
            tokens = GROUPS * SAMPLES * (PROMPT_TOKENS + response_tokens)
            for shared_prompt in (True, False):
                trainer = _trainer(Path(directory), device, shared_prompt=shared_prompt)
                step_s = _median_step_s(trainer, groups, advantages, steps)
                print(
                    f"{GROUPS}x{SAMPLES} samples of {PROMPT_TOKENS}+{response_tokens} tokens, "
                    f"shared_prompt={shared_prompt!s:5}: {step_s * 1e3:7.1f} ms a step, "
                    f"{tokens / step_s:8.0f} tokens/s"
                )


def _median_step_s(
    trainer: TorchTrainer, groups: list[Columns], advantages: list[tuple[float, ...]], steps: int
) -> float:
    times = list[float]()
    for step in range(1, steps + WARMUP + 1):
        started, key = time.perf_counter(), StepKey(step, step, 0)
        trainer.begin_train_step(key, LossSpec())
        trainer.train_microbatch(key.next(), groups, advantages)
        trainer.finish_train_step(key.next().next())
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARMUP:])


def _trainer(path: Path, device: str, *, shared_prompt: bool) -> TorchTrainer:
    return TorchTrainer(
        path,
        trainer=TrainerConfig(
            device=device,
            shared_prompt=shared_prompt,
            optimizer=OptimizerConfig(learning_rate=1e-4),
        ),
        model=ModelConfig(path=str(path)),
        total_steps=1000,
    )


def _make_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def _batch(response_tokens: int) -> tuple[list[Columns], list[tuple[float, ...]]]:
    rng, total = np.random.default_rng(0), SAMPLES * response_tokens
    groups: list[Columns] = [
        {
            "prompt_ids": rng.integers(0, 64, PROMPT_TOKENS, dtype=np.int32),
            "response_ids": rng.integers(0, 64, total, dtype=np.int32),
            "response_offsets": np.arange(0, total + 1, response_tokens, dtype=np.int64),
            "loss_mask": np.ones(total, np.bool_),
            "generation_logprobs": np.full(total, -4.0, np.float32),
        }
        for _ in range(GROUPS)
    ]
    return groups, [tuple(rng.normal(size=SAMPLES).tolist()) for _ in groups]


if __name__ == "__main__":
    main()
