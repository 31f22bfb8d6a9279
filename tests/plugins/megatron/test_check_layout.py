"""``offbeat check`` of a megatron trainer: what its config says of the model and the ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3Config,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    MambaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from offbeat.messages.finding import Finding, Level
from offbeat.plugins.megatron.checks import check_layout
from tests.support.recipes import make_config

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 4096,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "tie_word_embeddings": False,
}
LARGE = {"tensor_parallel": 8, "pipeline_parallel": 4, "expert_parallel": 16}


GLM: dict[str, Any] = {
    "vocab_size": 151_552,
    "hidden_size": 5120,
    "intermediate_size": 12_288,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "attention_bias": True,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
}
"""A model of 355 billion parameters."""
H100, H200 = 80 * 2**30, 139 * 2**30


def findings(path: Path, gpu: int | None = None, **trainer: Any) -> list[Finding]:
    config = make_config(
        {"path": str(path), "dtype": "bfloat16"},
        trainer={"backend": "megatron", "device": "cuda", "gpus": 1} | trainer,
    )
    return list(check_layout(config, gpu))


@pytest.mark.parametrize(
    ("stages", "experts", "context", "data"),
    [(4, 16, 1, 2), (4, 16, 2, 1), (2, 32, 1, 4)],
    ids=["TP8/PP4/EP16/ETP1/DP2", "TP8/PP4/CP2/EP16/ETP1/DP1", "TP8/PP2/EP32/DP4"],
)
def test_published_layouts_of_sixty_four_ranks_are_weighed_against_a_gpu(
    tmp_path: Path, stages: int, experts: int, context: int, data: int
) -> None:
    Glm4MoeConfig(**GLM).save_pretrained(tmp_path)
    sizes = {
        "tensor_parallel": 8,
        "expert_tensor_parallel": 1,
        "sequence_parallel": True,
        "pipeline_parallel": stages,
        "expert_parallel": experts,
        "context_parallel": context,
        "data_parallel": data,
    }
    (fits,) = findings(tmp_path, H200, **sizes)
    (larger,) = findings(tmp_path, H100, **sizes)
    # The last stage holds most: layers with experts, the output head and its norm.
    layers, matrix = 92 // stages, 3 * 5120 * 1536
    routed = layers * 160 // experts * matrix
    attention = (96 + 2 * 8) * 128 * 5121 + 96 * 128 * 5120
    vectors = 2 * 5120 + 2 * 128 + 160 * 5120  # norms and router
    dense = layers * ((attention + matrix) // 8 + vectors) + 151_552 // 8 * 5120 + 5120
    weights, gradients = 2 * (routed + dense) + layers * 160 * 4, 4 * (routed + dense)
    optimizer = 12 * (routed * experts // (8 * context * data) + dense // (context * data))
    total = weights + gradients + optimizer
    said = [f"{each / 2**30:.3g} GiB" for each in (total, weights, gradients, optimizer)]
    assert fits.level is Level.OK
    assert fits.message == (
        f"64 ranks; the largest holds {said[0]}: weights {said[1]}, gradients {said[2]}, "
        f"optimizer {said[3]}; activations come on top; its GPU has 139 GiB"
    )
    assert larger.level is Level.ERROR
    assert larger.message.endswith("; its GPU has 80 GiB")
    assert "trainer.expert_parallel" in larger.fix


def test_a_share_of_a_gpu_that_is_too_small_is_a_warning(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SIZES).save_pretrained(tmp_path)
    (found,) = findings(tmp_path, H200, sequence_parallel=True, **LARGE, data_parallel=2, gpus=0.1)
    assert found.level is Level.WARNING
    assert "0.1 of its GPU, which it reserves, is 13.9 GiB" in found.message
    assert found.fix.endswith("or raise trainer.gpus.")


def test_eight_stages_do_not_divide_a_hundred_and_eight_layers_and_four_do(tmp_path: Path) -> None:
    Glm4MoeConfig(**GLM | dict[str, Any](num_hidden_layers=108)).save_pretrained(tmp_path)
    sizes = {"tensor_parallel": 8, "expert_parallel": 8, "sequence_parallel": True}
    (eight,) = findings(tmp_path, pipeline_parallel=8, **sizes)
    (four,) = findings(tmp_path, pipeline_parallel=4, **sizes)
    assert eight.level is Level.ERROR
    assert "trainer.pipeline_parallel=8 is not a divisor of the model's 108 layers" in eight.message
    assert "trainer.layers_per_stage to [" in eight.fix
    assert four.level is Level.OK


@pytest.mark.parametrize("more", [{"data_parallel": 2}, {"context_parallel": 2}])
def test_layouts_of_sixty_four_ranks_are_taken_with_the_bytes_of_a_rank(
    tmp_path: Path, more: dict[str, int]
) -> None:
    Qwen3MoeConfig(**SIZES).save_pretrained(tmp_path)
    (found,) = findings(tmp_path, sequence_parallel=True, **LARGE, **more)
    # 23 layers of 10 experts of 3 x 4,096 x 1,536, of attention / 8, of a router; embedding / 8.
    layer = 10 * 3 * 4096 * 1536 + (2 * 96 + 2 * 8) * 128 * 4096 // 8 + 160 * 4096 + 2 * 4096 + 256
    weights = 23 * layer + 125 * 4096 + 4096
    assert found.level is Level.OK
    assert found.message.startswith("64 ranks; the largest holds ")
    assert f"weights {2 * weights / 2**30:.3g} GiB, gradients {4 * weights / 2**30:.3g} GiB" in (
        found.message
    )


def test_copies_share_the_optimizer_on_cuda_and_experts_have_other_copies(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SIZES).save_pretrained(tmp_path)
    (alone,) = findings(tmp_path, sequence_parallel=True, **LARGE, context_parallel=2)
    (shared,) = findings(
        tmp_path, sequence_parallel=True, **LARGE, context_parallel=2, data_parallel=2
    )
    first, second = (each.message.partition("optimizer ")[2].split()[0] for each in (alone, shared))
    assert float(second) == pytest.approx(float(first) / 2, rel=0.01)


def test_sizes_that_do_not_fit_get_one_choice_of_all_of_them(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SIZES).save_pretrained(tmp_path)
    (problem,) = findings(tmp_path, tensor_parallel=12, pipeline_parallel=8)
    assert problem.level is Level.ERROR
    assert problem.message == (
        "trainer.tensor_parallel=12 is not a divisor or a multiple of the model's 8 key-value heads; "
        "trainer.pipeline_parallel=8 is not a divisor of the model's 92 layers; "
        "trainer.sequence_parallel=false is not true: the library trains experts with tensor "
        "parallelism in no other way"
    )
    assert problem.fix == (
        "Set trainer.tensor_parallel to 16 and trainer.layers_per_stage to "
        "[11, 11, 12, 12, 12, 12, 11, 11] and trainer.sequence_parallel to true: together they fit."
    )


@settings(max_examples=settings().max_examples // 2)
@given(
    sizes=st.fixed_dictionaries(
        {
            "tensor_parallel": st.integers(1, 24),
            "pipeline_parallel": st.integers(1, 120),
            "data_parallel": st.sampled_from([1, 2, 6, 24]),
        }
    ),
    divisor=st.integers(0, 23),
)
def test_a_choice_that_is_proposed_passes(
    tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, int], divisor: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "moe"
    if not path.exists():
        Qwen3MoeConfig(**SIZES).save_pretrained(path)
    ranks = sizes["tensor_parallel"] * sizes["data_parallel"]
    divisors = [each for each in range(1, 25) if ranks % each == 0]
    sizes["expert_parallel"] = divisors[
        divisor % len(divisors)
    ]  # others are refused with the recipe
    (found,) = findings(path, **sizes)
    if found.level is Level.OK:
        return
    named = found.fix.removeprefix("Set ").removesuffix(": together they fit.").split(" and ")
    changes = dict(each.removeprefix("trainer.").split(" to ") for each in named)
    chosen = {name: json.loads(value) for name, value in changes.items()}
    (after,) = findings(path, **(sizes | chosen))
    assert after.level is Level.OK, after


@pytest.mark.parametrize(
    "config",
    [
        DeepseekV2Config(),
        DeepseekV3Config(),
        Gemma3Config(),
        GPT2Config(),
        GptOssConfig(),
        MambaConfig(),
        NemotronHConfig(),
        Qwen3NextConfig(),
    ],
    ids=lambda each: each.model_type,
)
def test_a_family_that_is_not_mapped_is_an_error_that_lists_those_that_are(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    config.save_pretrained(tmp_path)
    (found,) = findings(tmp_path)
    assert found.level is Level.ERROR
    assert f"is of family {config.model_type}" in found.message
    assert "not one of qwen2, qwen3, llama, qwen2_moe, qwen3_moe, glm4_moe, dots1" in found.message
    assert found.fix == "Train it with trainer.backend: torch."


def test_a_family_that_transformers_does_not_know_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')
    (found,) = findings(tmp_path)
    assert found.level is Level.ERROR
    assert "of_tomorrow" in found.message


def test_a_model_with_a_sigmoid_router_is_taken_with_the_bytes_of_its_biases(
    tmp_path: Path,
) -> None:
    Glm4MoeConfig(num_hidden_layers=46, attention_bias=True).save_pretrained(tmp_path)
    sizes = {"tensor_parallel": 4, "data_parallel": 4, "expert_parallel": 16}
    stages = {"pipeline_parallel": 4, "layers_per_stage": [12, 12, 11, 11]}
    (found,) = findings(tmp_path, sequence_parallel=True, **sizes, **stages)
    assert found.level is Level.OK
    assert found.message.startswith("64 ranks")


def test_other_backends_have_no_layout(tmp_path: Path) -> None:
    Qwen3Config().save_pretrained(tmp_path)
    assert list(check_layout(make_config(tmp_path))) == []
