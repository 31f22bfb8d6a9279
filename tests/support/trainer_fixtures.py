"""Tiny models, groups of random tokens, and trainers over them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.torch import TorchTrainer
from tests.support.random_groups import make_step
from tests.support.split_steps import Step

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=64, n_positions=512, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2
    )
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def compute_norms_in_float64(model: nn.Module) -> None:
    """transformers rounds the input of every RMS norm to float32: 1e-7 of noise in the gradient."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, (LlamaRMSNorm, Qwen3RMSNorm)):
                exact = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)


@pytest.fixture
def trainer_of(qwen3: Path) -> Callable[..., TorchTrainer]:
    """A float64 trainer of the tiny Qwen3; keywords override its trainer and optimizer sections."""

    def make(
        path: Path = qwen3,
        dtype: Any = "float64",
        optimizer: dict[str, Any] | None = None,
        total_steps: int = 10,
        max_model_len: int = 512,
        **section: Any,
    ) -> TorchTrainer:
        options = OptimizerConfig.model_validate({"learning_rate": 1e-2} | (optimizer or {}))
        trainer = TorchTrainer(
            path,
            trainer=TorchTrainerConfig(optimizer=options, **section),
            model=ModelConfig(path=str(path), dtype=dtype),
            total_steps=total_steps,
            max_model_len=max_model_len,
        )
        if dtype == "float64":
            compute_norms_in_float64(trainer.module)
        return trainer

    return make


@pytest.fixture(scope="session")
def step_data() -> Step:
    """Eight groups of uneven samples, some tokens masked, one sample without a valid token."""
    return make_step()
