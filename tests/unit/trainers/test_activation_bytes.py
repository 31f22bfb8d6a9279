"""The memory of a microbatch, counted on tensors without memory."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.torch.activation_bytes import activation_bytes
from offbeat.trainers.torch.proof import RowProof

ROOT = Path(__file__).resolve().parents[3]
PROOF = RowProof("sdpa", shared_prompt=True, plain_head=True)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def estimate(
    config: PreTrainedConfig, *, recompute: bool = False, response: int = 24
) -> int | None:
    group = {
        "prompt_ids": np.zeros(8, np.int32),
        "response_ids": np.zeros(3 * response, np.int32),
        "response_offsets": np.arange(4, dtype=np.int64) * response,
        "loss_mask": np.ones(3 * response, np.bool_),
    }
    trainer = TorchTrainerConfig(activation_checkpointing=recompute)
    found = activation_bytes(config, [group], trainer, torch.float32, PROOF)
    return found and found[0]


def layers(count: int) -> Qwen3Config:
    return Qwen3Config(**SIZES, num_hidden_layers=count)


def test_layers_take_most_and_recomputed_ones_little() -> None:
    one, nine = estimate(layers(1)), estimate(layers(9))
    assert one
    assert nine
    assert nine > 4 * one
    recomputed = estimate(layers(9), recompute=True)
    assert recomputed
    assert recomputed < nine / 3
    assert recomputed >= 9 * 3 * 31 * 64 * 4, "the input of each layer is kept"


def test_experts_are_not_estimated() -> None:
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    config = Qwen3MoeConfig(**SIZES, num_hidden_layers=2, **experts)
    assert estimate(config) is None


def benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "activations.py"
    spec = importlib.util.spec_from_file_location("activations", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
def test_an_estimate_is_within_a_fifth_of_resident_memory(tmp_path: Path, recompute: bool) -> None:
    sizes: dict[str, Any] = SIZES | {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "vocab_size": 20_000,
    }
    Qwen3Config(**sizes, num_hidden_layers=4).save_pretrained(tmp_path)
    of = benchmark()
    found = of.measured(str(tmp_path), replace(of.CASES[0], layers=4, recompute=recompute))
    assert found["estimate"] == pytest.approx(found["measured"], rel=0.2)
