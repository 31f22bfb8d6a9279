"""``offbeat check`` says which models tensor ranks of the torch trainer divide, and what one holds."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CohereConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offbeat.launch.checks.torch_ranks import check_data_ranks
from offbeat.messages.finding import Finding, Level, size
from offbeat.trainers.trainer_plugin import find_parts
from tests.support.recipes import make_config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


GEMMA_4: dict[str, Any] = {
    **SIZES,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 0,
}


def findings(
    path: Path, model: PreTrainedConfig, gpu: int | None = None, **trainer: Any
) -> list[Finding]:
    model.save_pretrained(path)
    run = make_config(path, trainer=trainer)
    of_parts = (part.check(run, gpu) for part in find_parts(run))
    return [*chain(check_data_ranks(run, gpu), *of_parts)]


def test_ranks_are_said_with_the_bytes_that_the_largest_holds(tmp_path: Path) -> None:
    model = LlamaConfig(**SIZES, tie_word_embeddings=False)
    (found,) = findings(tmp_path, model, tensor_parallel=2, data_parallel=2)
    matrices = 2 * (48 * 16 * (4 + 2 + 2 + 4) + 3 * 48 * 80) // 2
    vocabulary, norms = 2 * 64 * 48 // 2, 5 * 48
    weights = (matrices + vocabulary + norms) // 2 * 4
    assert found.level is Level.OK
    assert found.message.startswith(f"4 ranks; the largest holds {size(4 * weights + 32)}")
    assert f"gradients {size(weights)}, optimizer {size(2 * weights)}" in found.message


def test_of_adapters_the_base_is_frozen_and_one_side_of_each_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    model = LlamaConfig(**SIZES, tie_word_embeddings=False)
    lora = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}
    (found,) = findings(tmp_path, model, tensor_parallel=2, lora=lora)
    matrices = 2 * (48 * 16 * (4 + 2 + 2 + 4) + 3 * 48 * 80) // 2
    base = matrices + 2 * 64 * 48 // 2 + 5 * 48
    adapters = 2 * 4 * (48 + 64 // 2 + 80 // 2 + 48)
    assert found.message.startswith(
        f"2 ranks; the largest holds {size(4 * base + 16 * adapters + 32)}"
    )
    assert f"gradients {size(4 * adapters)}, optimizer {size(8 * adapters)}" in found.message


def test_a_plan_may_name_experts_that_a_model_of_the_class_lacks(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, Gemma4TextConfig(**GEMMA_4), tensor_parallel=2)
    assert found.level is Level.OK


@pytest.mark.parametrize("ranks", [{"data_parallel": 2}, {"tensor_parallel": 2}])
def test_ranks_beyond_their_gpu_are_an_error_and_beyond_their_share_a_warning(
    tmp_path: Path, ranks: dict[str, int]
) -> None:
    model = LlamaConfig(**SIZES, tie_word_embeddings=False)
    elements = 2 * (48 * 16 * (4 + 2 + 2 + 4) + 3 * 48 * 80) + 2 * 64 * 48
    norms = 5 * 48 if "tensor_parallel" in ranks else 5 * 48 // 2
    frequencies = 2 * 8 * 4  # of the rotations, and as they were at first
    need = 16 * (elements // 2 + norms) + frequencies
    on_gpu = ranks | {"device": "cuda", "gpus": 0.5}
    given = (need - 1, need, 2 * need - 1, 2 * need)
    found = [findings(tmp_path, model, gpu, **on_gpu)[0] for gpu in given]
    levels = [each.level for each in found]
    assert levels == [Level.ERROR, Level.WARNING, Level.WARNING, Level.OK]
    assert found[0].message.endswith(f"its GPU has {size(need - 1)}")
    assert found[0].fix.startswith("Raise trainer.data_parallel, ")
    assert "0.5 of its GPU, which it reserves, is" in found[1].message
    assert found[1].fix.endswith("or raise trainer.gpus.")


@pytest.mark.parametrize(
    ("model", "ranks", "problem", "fix"),
    [
        (Qwen3Config(**SIZES), 4, "has 2 key-value heads", "to one of 1, 2."),
        (
            Qwen3Config(**SIZES | dict[str, Any](intermediate_size=81)),
            2,
            "has 81 columns in model.layers.0.mlp.gate_proj",
            "to one of 1.",
        ),
        (
            Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
            2,
            "its config has num_experts=4, but experts are not divided",
            "Set trainer.tensor_parallel to 1",
        ),
        (
            Phi3Config(
                **{name: size for name, size in SIZES.items() if name != "head_dim"}, pad_token_id=0
            ),
            2,
            "base_model_tp_plan has colwise_gather_output for layers.*.self_attn.qkv_proj",
            "Set trainer.tensor_parallel to 1",
        ),
        (
            CohereConfig(**SIZES, use_qk_norm=True),
            2,
            "model.layers.0.self_attn.q_norm.weight reads what base_model_tp_plan divides",
            "Set trainer.tensor_parallel to 1",
        ),
        (
            Gemma4TextConfig(
                **GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
            ),
            2,
            "has 1 key-value heads",
            "to one of 1.",
        ),
        (GPT2Config(), 2, "its config has no base_model_tp_plan", "trainer.tensor_parallel to 1"),
    ],
    ids=["heads", "columns", "experts", "kinds", "left out", "heads of a layer", "no plan"],
)
def test_a_model_that_is_not_divided_is_refused_by_name(
    tmp_path: Path, model: PreTrainedConfig, ranks: int, problem: str, fix: str
) -> None:
    (found,) = findings(tmp_path, model, tensor_parallel=ranks)
    assert found.level is Level.ERROR
    assert problem in found.message
    assert fix in found.fix
