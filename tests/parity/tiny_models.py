"""Tiny random models of every family, as Hugging Face directories."""

from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from parity_cases import SIZES
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.dots1.modeling_dots1 import Dots1RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextRMSNorm

NORMS = (
    Dots1RMSNorm,
    Glm4MoeRMSNorm,
    LlamaRMSNorm,
    Qwen2_5_VLRMSNorm,
    Qwen2RMSNorm,
    Qwen2MoeRMSNorm,
    Qwen3RMSNorm,
    Qwen3MoeRMSNorm,
    Qwen3VLMoeTextRMSNorm,
    Qwen3VLTextRMSNorm,
)
SIGMOID: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}
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
    # Two tensor ranks have 43 columns each, of which two data ranks have 22 and 21
    "llama-biased": LlamaConfig(
        **SIZES | dict[str, Any](intermediate_size=86),
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    # A token whose row of the embedding is not trained, among those of the second of two ranks
    "llama-padded": LlamaConfig(**SIZES, pad_token_id=40, tie_word_embeddings=False),
    "qwen3-yarn": Qwen3Config(**SIZES, rope_parameters=YARN, tie_word_embeddings=False),
    "qwen2-moe": Qwen2MoeConfig(
        **{name: value for name, value in SIZES.items() if name != "head_dim"}
        | dict[str, Any](num_hidden_layers=3),
        **EXPERTS,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    ),
    "glm4-moe": Glm4MoeConfig(**SIZES | SIGMOID, attention_bias=True),
    "dots1": Dots1Config(
        **SIZES | SIGMOID | dict[str, Any](n_routed_experts=8, num_experts_per_tok=4),
        n_group=4,
        topk_group=2,
    ),
    "moe": Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False, norm_topk_prob=True),
}


def save_tiny_model(name: str, path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():
        if parameter.ndim == 1:  # else norms are ones and biases zeros: easily mistaken
            nn.init.uniform_(parameter, 0.5, 1.5)
    for place, buffer in model.named_buffers():
        if place.endswith("e_score_correction_bias"):
            nn.init.uniform_(buffer, -0.3, 0.3)  # wide enough to choose other experts
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")


def unrounded(function: Any) -> Any:
    """The same code of transformers, to which float32 is float64."""
    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})
    known = function.__globals__ | {"torch": wide}
    return FunctionType(function.__code__, known, function.__name__)


def compute_in_float64(model: Any) -> None:
    """transformers rounds norms and the scores of routers to float32: 1e-7 of noise in the gradient.

    Its grouped experts know no float64 at all. A vision tower is left as it is: every backend computes
    with the same modules.
    """
    for parent in list(model.get_decoder().modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, NORMS):
                exact = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(parent, name, exact)
            if hasattr(norm, "top_k") and hasattr(norm, "weight"):
                norm.forward = MethodType(unrounded(type(norm).forward), norm)
    if model.config.model_type in ("qwen2_moe", "qwen3_moe", "glm4_moe", "dots1", "qwen3_vl_moe"):
        model.set_experts_implementation("eager")
