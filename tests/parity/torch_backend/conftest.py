"""Tiny models and a step of random tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import SIZES, Step, group
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny models by name."""
    root = tmp_path_factory.mktemp("models")

    def path_of(name: str) -> Path:
        path = root / name
        if not path.exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(CONFIGS[name])
            for parameter in model.parameters():
                if parameter.ndim == 1:  # else norms are ones: easily mistaken for one another
                    nn.init.uniform_(parameter, 0.5, 1.5)
            model.save_pretrained(path)
            (path / "tokenizer.json").write_text("{}")
        return path

    return path_of


@pytest.fixture(scope="session")
def step() -> Step:
    """Seven groups of uneven samples, some tokens masked, one sample without a valid token."""
    rng = np.random.default_rng(0)
    groups = [group(rng, int(rng.integers(1, 9)), rng.integers(1, 12, 4)) for _ in range(7)]
    offsets = groups[3]["response_offsets"]
    groups[3]["loss_mask"][offsets[1] : offsets[2]] = False
    return Step(groups, [tuple(rng.normal(size=4).tolist()) for _ in groups])
