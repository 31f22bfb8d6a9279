"""The world of ranks, tiny models and a step of random tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_reference import SIZES, Step, group
from megatron_world import MegatronWorld
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from world import World


@pytest.fixture(scope="session")
def megatron_world(world: World) -> MegatronWorld:
    return MegatronWorld(world)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny models by name."""
    root = tmp_path_factory.mktemp("models")
    qwen2 = {name: value for name, value in SIZES.items() if name != "head_dim"}
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    configs = {
        "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
        "qwen3-tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
        "qwen2": Qwen2Config(**qwen2, tie_word_embeddings=False),
        "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
        "moe": Qwen3MoeConfig(**SIZES, **experts, tie_word_embeddings=False, norm_topk_prob=True),
    }

    def path_of(name: str) -> Path:
        path = root / name
        if not path.exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(configs[name])
            for parameter in model.parameters():
                if parameter.ndim == 1:  # else norms are ones and biases zeros: easily mistaken
                    nn.init.uniform_(parameter, 0.5, 1.5)
            model.save_pretrained(path)
            (path / "tokenizer.json").write_text("{}")
        return path

    return path_of


@pytest.fixture(scope="session")
def step_data() -> Step:
    """Seven groups of uneven samples, some tokens masked, one sample without a valid token."""
    rng = np.random.default_rng(0)
    groups = [group(rng, int(rng.integers(1, 9)), rng.integers(1, 12, 4)) for _ in range(7)]
    offsets = groups[3]["response_offsets"]
    groups[3]["loss_mask"][offsets[1] : offsets[2]] = False
    return groups, [tuple(rng.normal(size=4).tolist()) for _ in groups]
