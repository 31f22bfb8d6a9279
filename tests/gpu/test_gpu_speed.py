"""Speed and memory of models of real sizes with random weights: a trainer and an engine on one device."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from offbeat.telemetry.records import read_metrics
from tests.gpu.conftest import TINY, Measured
from tests.gpu.local_run import start

STEPS: Final = 6
SKIPPED: Final = 2  # the first steps compile kernels and grow the allocator
GIB: Final = 2**30
REWARD: Final = """\
import random

def reward(prompt, response, **row):
    return float(random.Random(response).random() < 0.5)
"""


class Size(NamedTuple):
    """A model and the steps that it is measured with."""

    config: LlamaConfig | Qwen2Config
    groups: int
    samples: int
    new_tokens: int


SMALL: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
"""What a rehearsal on a CPU computes in seconds."""


def smollm2(device: str) -> Size:
    sizes: dict[str, Any] = {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    return _size(LlamaConfig, sizes, device)


def qwen2_1b(device: str) -> Size:
    sizes: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    }
    return _size(Qwen2Config, sizes, device)


def _size(kind: type[LlamaConfig | Qwen2Config], sizes: dict[str, Any], device: str) -> Size:
    is_rehearsal = device == "cpu"
    config = kind(
        **(SMALL if is_rehearsal else sizes), max_position_embeddings=2048, tie_word_embeddings=True
    )
    return Size(config, 2, 4, 16) if is_rehearsal else Size(config, 16, 16, 128)


SIZES: Final = {"SmolLM2-135M": smollm2, "Qwen2.5-1.5B": qwen2_1b}


@pytest.fixture(scope="module", params=SIZES)
def sized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Size, Path]:
    """Return a name, its size and a directory with random weights in bfloat16."""
    device = str(request.config.getoption("--gpu-device", "cuda"))
    size = SIZES[request.param](device)
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(size.config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, directory)
    return request.param if device != "cpu" else "rehearsal", size, directory


def write_recipe(folder: Path, model: Path, size: Size) -> Path:
    """Write a recipe whose rewards are random, so that every group has a gradient."""
    (folder / "coin.py").write_text(REWARD)
    rows = "".join(json.dumps({"prompt": f"{number}+{number}="}) + "\n" for number in range(64))
    (folder / "rows.jsonl").write_text(rows)
    values: dict[str, Any] = {
        "name": "speed",
        "seed": 0,
        "steps": STEPS,
        "groups_per_step": size.groups,
        "samples_per_group": size.samples,
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {"path": str(folder / "rows.jsonl")},
        "environment": {"name": "function", "target": "coin:reward"},
        "sampler": {"name": "ready_first", "max_staleness": 0},
        "generator": {
            "backend": "embedded",
            "max_model_len": 256,
            "max_sequences": size.groups * size.samples,
            "sampling": {"max_new_tokens": size.new_tokens},
        },
        "trainer": {
            "backend": "torch",
            "max_tokens_per_microbatch": 16_384,
            "optimizer": {"learning_rate": 1e-6},
        },
        "wandb": {"mode": "disabled"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("shared", [False, True], ids=["two copies", "one copy"])
def test_steps_of_a_real_size(
    run_root: Path, device: str, sized: tuple[str, Size, Path], shared: bool, measured: Measured
) -> None:
    name, size, model = sized
    recipe = write_recipe(run_root, model, size)
    run_dir = run_root / "run"
    share = f"generator.share_weights={str(shared).lower()}"
    with start(recipe, run_dir, device, share) as run:
        assert run.exit_code(within_s=240) == 0
    records = read_metrics(run_dir / "metrics.jsonl")
    assert len(records) == STEPS
    copies = "one copy of the weights" if shared else "two copies of the weights"
    how = f"{name}, bfloat16, {size.groups} x {size.samples} samples of {size.new_tokens} tokens, {copies}"
    for metric, what, unit in (
        ("time/step_s", "seconds per step, staleness 0", "s"),
        ("rollout/generate_s_mean", "seconds of a group in the engine", "s"),
        ("throughput/tokens_per_s", "tokens per second of the run", "tokens/s"),
        ("throughput/device_tokens_per_s", "tokens per second of the trainer's passes", "tokens/s"),
        ("throughput/device_flop_per_s", "FLOP per second of the trainer's passes", "FLOP/s"),
        ("throughput/mfu", "share of the peak in the trainer's passes", ""),
        ("sync/pause_s", "pause of the engine in a sync", "s"),
        ("sync/transfer_s", "transfer of a sync", "s"),
    ):
        values = [each.metrics[metric] for each in records[SKIPPED:] if metric in each.metrics]
        if values:  # a CPU has no known peak, and one copy has no transfer
            measured(what, statistics.median(values), unit, how)
    generated = size.groups * size.samples * size.new_tokens
    engine_s = statistics.median(
        each.metrics["rollout/generate_s_mean"] for each in records[SKIPPED:]
    )
    measured("tokens per second of the engine", generated / engine_s, "tokens/s", how)
    peaks = [
        value / GIB
        for each in records
        for metric, value in each.metrics.items()
        if metric.startswith("memory/peak_")
    ]
    measured("highest memory of trainer and engine", max(peaks), "GiB", how)
