"""Tiny random models of every family, as Hugging Face directories."""

from pathlib import Path
from typing import Any

import torch
from parity_cases import SIZES
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

NORMS = (LlamaRMSNorm, Qwen2RMSNorm, Qwen2MoeRMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm)
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3-3": Qwen3Config(
        **SIZES | dict[str, Any](num_hidden_layers=3), tie_word_embeddings=False
    ),
    "qwen3-tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        tie_word_embeddings=False,
    ),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters=LINEAR, tie_word_embeddings=False),
    "llama-llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False),
    "qwen3-yarn": Qwen3Config(**SIZES, rope_parameters=YARN, tie_word_embeddings=False),
    "qwen2-moe": Qwen2MoeConfig(
        **{name: value for name, value in SIZES.items() if name != "head_dim"}
        | dict[str, Any](num_hidden_layers=3),
        **EXPERTS,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    ),
    "moe": Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False, norm_topk_prob=True),
}


def save_tiny_model(name: str, path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():
        if parameter.ndim == 1:  # else norms are ones and biases zeros: easily mistaken
            nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")


def compute_in_float64(model: Any) -> None:
    """transformers rounds the input of every norm to float32: 1e-7 of noise in the gradient.

    Its grouped experts know no float64 at all.
    """
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, NORMS):
                exact = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)
    if model.config.model_type in ("qwen2_moe", "qwen3_moe"):
        model.set_experts_implementation("eager")
