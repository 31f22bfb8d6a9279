"""Measures memory and time of long rows, and whether the trainer picks the cheapest layout.

    OMP_NUM_THREADS=1 python -m benchmarks.long_rows          # 2k, 8k and 32k tokens per row
    OMP_NUM_THREADS=1 python -m benchmarks.long_rows --choice # layouts of rows, by size
    OMP_NUM_THREADS=1 python -m benchmarks.long_rows --choice --sizes 5 6   # the two longest

Lengths: forward and backward of one row, each side in a process of its own, on one thread. *Plain* is
transformers' forward with a loss on its logits; *ours* is a chunk of a train step with
``activation_checkpointing``, which recomputes the layers; *plain, recomputed* does the same. *tree* is
a row of that many tokens of which three quarters are a prompt shared by eight branches.

Choice: CPU seconds of one chunk by layout, in turn, and what the trainer picks; ratios to *apart*.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.trainer_cases import Groups
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.trainers.batches.packing import Batch, PackedRow
from offbeat.trainers.batches.planner import MicrobatchPlanner, RowLayout
from offbeat.trainers.memory import ResidentMeter
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk

VOCABULARY: Final = 16_384
LONGEST: Final = 40_000
SIDES: Final = ("ours", "tree", "plain", "plain, recomputed")
LENGTHS: Final = (2048, 8192, 32_768)
SIZES: Final = {  # groups, prompt, samples, response
    "16 x 8 samples, 8 + 4 tokens": (16, 8, 8, 4),
    "8 x 8 samples, 32 + 32 tokens": (8, 32, 8, 32),
    "4 x 8 samples, 64 + 200 tokens": (4, 64, 8, 200),
    "4 x 8 samples, 400 + 40 tokens": (4, 400, 8, 40),
    "4 x 1 sample, 500 + 500 tokens": (4, 500, 1, 500),
    "2 x 8 samples, 300 + 1,000 tokens": (2, 300, 8, 1000),
    "1 x 4 samples, 4,000 + 1,000 tokens": (1, 4000, 4, 1000),
}
_MIB: Final = 2**20


@dataclass(frozen=True)
class Forced(MicrobatchPlanner):
    """A planner of one layout."""

    layout: RowLayout = RowLayout.APART

    def _plans(self, batch: Batch) -> Iterator[tuple[RowLayout, list[list[PackedRow]]]]:
        return (each for each in super()._plans(batch) if each[0] is self.layout)


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--choice", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=range(len(SIZES)))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if options.side:
        json.dump(measured(options.side, options.lengths[0], options.model), sys.stdout)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory), options.hidden)
        compare_layouts(model, options.rounds, options.sizes) if options.choice else compare(
            model, options.lengths
        )


def save_model(directory: Path, hidden: int) -> Path:
    """Write a random Llama of four layers; return its directory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def compare(model: Path, lengths: list[int]) -> None:
    """Print seconds and MiB by side and length, and what they are beside the shorter length."""
    for side in SIDES:
        before: dict[str, float] | None = None
        for tokens in lengths:
            command = [sys.executable, "-m", "benchmarks.long_rows", "--side", side]
            command += ["--model", str(model), "--lengths", str(tokens)]
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{side:18} {tokens:6} ended with code {done.returncode}", flush=True)
                continue
            found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            line = f"{side:18} {tokens:6} {found['cpu_s']:7.1f} s {found['peak_mib']:7.0f} MiB"
            line += f" {found['peak_mib'] * 1024 / tokens:6.1f} KiB/token"
            if before is not None:
                scale = tokens / before["tokens"]
                memory = found["peak_mib"] / before["peak_mib"] / scale
                speed = found["cpu_s"] / before["cpu_s"] / (found["flops"] / before["flops"])
                line += f" | beside the length before: {memory:.2f} memory per token"
                line += f", {speed:.2f} time over that of the FLOP count"
            print(line, flush=True)
            before = found | {"tokens": tokens}


def measured(side: str, tokens: int, path: Path) -> dict[str, float]:
    """Seconds of CPU and peak MiB of one row, forward and backward, above a loaded model."""
    prompt, branches = (3 * tokens // 4, 8) if side == "tree" else (tokens // 4, 1)
    group = make_group(prompt, branches, (tokens - prompt) // branches)
    if side in {"ours", "tree"}:
        trainer = make_trainer(path, tokens, recompute=True)
        warm = make_group(16, 1, 16)

        def work(groups: Groups, number: int) -> None:
            chunk(trainer, groups, number)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if side == "plain, recomputed":
            model.gradient_checkpointing_enable()
            model.train()
        warm = make_group(16, 1, 16)

        def work(groups: Groups, number: int) -> None:
            del number
            plain(model, groups[0])

    work([warm], 1)
    meter = ResidentMeter()
    meter.start()
    before, began = meter.peak(), time.process_time()
    work([group], 2)
    spent = time.process_time() - began
    pairs = prompt**2 / 2 + (tokens - prompt) * prompt + (tokens - prompt) ** 2 / 2 / branches
    flops = flops_of(path, tokens, tokens - prompt, pairs)
    return {"cpu_s": spent, "peak_mib": (meter.peak() - before) / _MIB, "flops": flops}


def flops_of(path: Path, tokens: int, places: int, pairs: float) -> float:
    """``6 W_layers tokens + 6 W_head places + 12 layers hidden pairs``; recomputation scales it."""
    config = LlamaConfig.from_pretrained(path)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    weights = layers * (3 * hidden**2 + 3 * hidden * config.intermediate_size)
    return 6 * weights * tokens + 6 * hidden * VOCABULARY * places + 12 * layers * hidden * pairs


def compare_layouts(path: Path, rounds: int, numbers: list[int]) -> None:
    """Print CPU seconds of one chunk by layout, and the trainer's choice."""
    for name, size in [list(SIZES.items())[number] for number in numbers]:
        trainer = make_trainer(path, 8192, recompute=False)
        own: MicrobatchPlanner = trainer.own_passes.planner
        groups, prompt, samples, response = size
        step = [make_group(prompt, samples, response, seed) for seed in range(groups)]
        batch, _ = own.cut(step, only_trained=True)
        assert batch is not None  # noqa: S101 -- of groups
        choice, _ = own._cheapest(batch)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        fields = (own.max_tokens, own.shared_prompt, own.ratio_tokens, own.vocabulary)
        number, spent = 0, {layout: list[float]() for layout in RowLayout}
        for turn in range(rounds + 1):
            for layout in RowLayout:
                number += 1
                trainer.own_passes.planner = Forced(*fields, layout, call_pairs=own.call_pairs)
                began = time.process_time()
                chunk(trainer, step, number)
                if turn:
                    spent[layout].append(time.process_time() - began)
        ratios = {
            layout.value: statistics.median(
                each / apart for each, apart in zip(times, spent[RowLayout.APART], strict=True)
            )
            for layout, times in spent.items()
        }
        apart_ms = statistics.median(spent[RowLayout.APART]) * 1e3
        text = ", ".join(f"{layout} {ratio:.2f}" for layout, ratio in ratios.items())
        print(f"{name:38} apart {apart_ms:8.1f} ms | {text} | picked {choice.value}", flush=True)


def chunk(trainer: TorchTrainer, groups: Groups, number: int) -> None:
    """Compute the gradient of one chunk, and discard it."""
    key = StepKey(number, number, 0)
    trainer.begin_train_step(key, LossSpec())
    key = key.next()
    trainer.train_microbatch(
        key, build_chunk(groups), [(1.0,) * (len(g["response_offsets"]) - 1) for g in groups]
    )
    trainer.finish_train_step(key.next())


def plain(model: Any, group: dict[str, Any]) -> None:  # noqa: ANN401 -- transformers leaves it open
    """Compute the gradient of one sample by transformers' forward and torch's cross entropy."""
    ids = np.concatenate([group["prompt_ids"], group["response_ids"]]).astype(np.int64)
    row, keep = torch.from_numpy(ids)[None], len(group["response_ids"])
    logits = model(input_ids=row[:, :-1], use_cache=False, logits_to_keep=keep).logits[0]
    torch.nn.functional.cross_entropy(logits, row[0, -keep:]).backward()
    model.zero_grad()


def make_trainer(path: Path, tokens: int, *, recompute: bool) -> TorchTrainer:
    """Return a float32 trainer of a model, with microbatches of so many tokens."""
    return TorchTrainer(
        path,
        trainer=TorchTrainerConfig(
            max_tokens_per_microbatch=tokens, activation_checkpointing=recompute
        ),
        model=ModelConfig(path=str(path), dtype="float32"),
        total_steps=1_000_000,
        max_model_len=LONGEST,
    )


def make_group(prompt: int, samples: int, response: int, seed: int = 0) -> dict[str, Any]:
    """Return a group of random tokens."""
    rng, total = np.random.default_rng(seed), samples * response
    return {
        "prompt_ids": rng.integers(0, VOCABULARY, prompt, dtype=np.int32),
        "response_ids": rng.integers(0, VOCABULARY, total, dtype=np.int32),
        "response_offsets": np.arange(0, total + 1, response, dtype=np.int64),
        "loss_mask": np.ones(total, np.bool_),
        "generation_logprobs": np.full(total, -9.7, np.float32),
        "weight_versions": np.zeros(total, np.int32),
    }


if __name__ == "__main__":
    main()
