"""What the megatron trainer reads of a model's config, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Dots1Config,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from offbeat.plugins.megatron.architecture import read_architecture
from offbeat.trainers.errors import UntrainableModel
from tests.support.image_text_models import make

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_the_sizes_of_a_decoder_are_read_from_its_config(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    Qwen3Config(**SIZES, rope_parameters=rope, tie_word_embeddings=True).save_pretrained(tmp_path)
    read = read_architecture(tmp_path)
    assert (read.layers, read.hidden, read.heads, read.groups) == (2, 16, 4, 2)
    assert (read.head_dim, read.intermediate, read.vocabulary) == (8, 24, 32)
    assert (read.rope_theta, read.tied, read.qk_norm, read.qkv_bias) == (5e5, True, True, False)
    assert (read.experts, read.experts_per_token) == (0, 0)


def test_an_expert_has_the_size_of_one_expert(tmp_path: Path) -> None:
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
    }
    Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=False).save_pretrained(tmp_path)
    read = read_architecture(tmp_path)
    assert (read.experts, read.experts_per_token, read.expert_intermediate) == (4, 3, 12)
    assert not read.normalise_routing
    assert read.layer_weights == 2 * 16 * 8 * (4 + 2) + 3 * 16 * 12 * 3


@pytest.mark.parametrize(
    ("feature", "named"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "scales its positions by 'dynamic', not by one of default, linear, llama3, yarn",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
            "has layers of kind sliding_attention",
        ),
        ({"hidden_act": "gelu"}, "computes its MLP with 'gelu'"),
        ({"attention_bias": True}, "has biases in attention"),
    ],
)
def test_a_feature_that_it_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, feature: dict[str, Any], named: str
) -> None:
    Qwen3Config(**SIZES, **feature).save_pretrained(tmp_path)
    with pytest.raises(UntrainableModel, match=named):
        read_architecture(tmp_path)


def test_layers_without_experts_are_those_of_transformers(tmp_path: Path) -> None:
    sparse: dict[str, Any] = {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 6, "num_experts": 4, **sparse}
    config = Qwen3MoeConfig(**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        layers: Any = Qwen3MoeForCausalLM(config).model.layers
    read = read_architecture(tmp_path)
    has_experts = [hasattr(layer.mlp, "experts") for layer in layers]
    assert [read.has_experts(layer) for layer in range(6)] == has_experts
    assert any(has_experts) and not all(has_experts)


def test_a_shared_expert_has_a_size_of_its_own(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    shared: dict[str, Any] = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
    Qwen2MoeConfig(**sizes, num_experts=4, **shared).save_pretrained(tmp_path)
    read = read_architecture(tmp_path)
    assert (read.intermediate, read.expert_intermediate, read.shared_intermediate) == (24, 12, 20)
    assert read.qkv_bias


SIGMOID: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}


def test_a_router_with_sigmoid_scores_is_read_with_its_bias_scale_and_shared_experts(
    tmp_path: Path,
) -> None:
    config = Glm4MoeConfig(**SIZES, **SIGMOID, attention_bias=True, use_qk_norm=True)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        layers: Any = Glm4MoeForCausalLM(config).model.layers
    read = read_architecture(tmp_path)
    assert read.sigmoid_routing
    assert (read.experts, read.experts_per_token, read.routing_scale) == (4, 2, 2.5)
    assert [read.has_experts(layer) for layer in range(2)] == [
        hasattr(layer.mlp, "experts") for layer in layers
    ]
    shared = layers[1].mlp.shared_experts
    assert read.shared_intermediate == shared.intermediate_size == 24
    assert (read.shared_gate, read.shared_name) == (False, "shared_experts")
    assert (read.rotary_fraction, read.qkv_bias, read.qk_norm) == (0.5, True, True)


def test_groups_of_experts_are_read(tmp_path: Path) -> None:
    Dots1Config(**SIZES, **SIGMOID, n_group=2, topk_group=1).save_pretrained(tmp_path)
    read = read_architecture(tmp_path)
    assert (read.routing_groups, read.routing_groups_per_token) == (2, 1)
    assert not read.normalise_routing
    assert (read.rotary_fraction, read.qkv_bias, read.qk_norm) == (1.0, False, True)


def test_scaled_positions_are_those_of_transformers(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **sizes}
    config = Qwen3Config(**SIZES, rope_parameters=rope, max_position_embeddings=256)
    config.save_pretrained(tmp_path)
    want = Qwen3RotaryEmbedding(config)
    read = read_architecture(tmp_path)
    assert read.rope_frequencies == tuple(want.inv_freq.tolist())
    assert read.rope_scale == want.attention_scaling > 1


def test_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    DeepseekV3Config(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(UntrainableModel, match="multi-head latent attention"):
        read_architecture(tmp_path)


def test_a_family_that_is_not_mapped_is_refused(tmp_path: Path) -> None:
    GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(UntrainableModel, match="is of family gpt2, not one of qwen2, qwen3, llama"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("family", "decoder", "axes"),
    [
        ("idefics3", "model.text_model", None),
        ("qwen2_5_vl", "model.language_model", (0, 1, 2, 2)),
        ("qwen3_vl", "model.language_model", (0, 1, 2, 0)),
        ("qwen3_vl_moe", "model.language_model", (0, 1, 2, 0)),
    ],
)
def test_what_is_not_decoder_or_head_of_an_image_text_model_is_its_tower(
    tmp_path: Path, family: str, decoder: str, axes: tuple[int, ...] | None
) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    read = read_architecture(tmp_path)
    assert (read.layers, read.vocabulary, read.tied) == (2, 64, False)
    assert (read.decoder, read.axis_of_pair) == (decoder, axes)
    assert read.qkv_bias == (family == "qwen2_5_vl")
    is_third = family.startswith("qwen3_vl")
    assert (read.qk_norm, read.deep_layers) == ((True, 1) if is_third else (False, 0))
    assert read.expert_layers == ((0, 1) if family == "qwen3_vl_moe" else ())
    assert dict(read.tower) == {
        name: tuple(each.shape)
        for name, each in model.named_parameters()
        if not name.startswith((decoder, "lm_head"))
    }


def test_a_model_whose_pictures_are_not_computed_here_is_refused_by_name(tmp_path: Path) -> None:
    make("gemma3").save_pretrained(tmp_path)
    named = r"is of family gemma3 \(it reads media\), not one of qwen2, .*, idefics3, smolvlm"
    with pytest.raises(UntrainableModel, match=named) as refused:
        read_architecture(tmp_path)
    assert refused.value.fix == "Train it with trainer.backend: torch"
