"""Switching a model between attention implementations."""

import pytest
from transformers import AutoModelForCausalLM, BloomConfig, PreTrainedModel, Qwen3Config

from offbeat.model_proof.plain import attend_by, eager_attention


def implementation(model: PreTrainedModel) -> str | None:
    return model.config._attn_implementation  # noqa: SLF001 - there is no public name


@pytest.fixture
def qwen3() -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
    )
    return AutoModelForCausalLM.from_config(config)


def test_a_model_is_switched_and_says_so(qwen3: PreTrainedModel) -> None:
    for name in ("eager", "sdpa", "sdpa"):
        assert attend_by(qwen3, name)
        assert implementation(qwen3) == name


def test_a_class_with_one_implementation_is_not_switched_and_says_so() -> None:
    config = BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)
    bloom: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    assert not attend_by(bloom, "sdpa")
    assert attend_by(bloom, "eager")


def test_eager_attention_ends_with_the_block_whatever_becomes_of_it(
    qwen3: PreTrainedModel,
) -> None:
    attend_by(qwen3, "sdpa")
    seen = list[str | None]()

    def block() -> None:
        with eager_attention(qwen3):
            seen.append(implementation(qwen3))
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        block()
    assert [*seen, implementation(qwen3)] == ["eager", "sdpa"]
