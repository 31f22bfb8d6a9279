"""Comparing log-probabilities, and switching a model between attention implementations and dtypes."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, PreTrainedModel, Qwen3Config

from offbeat.models.plain import (
    TINY_TOLERANCE,
    attend_by,
    distance,
    eager_attention,
    in_float32,
    plain_logprobs,
)
from tests.support.model_families import family_model


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


def test_a_distance_counts_in_parts_of_the_spread_of_log_probabilities() -> None:
    want = [torch.tensor([-1.0, -3.0]), torch.tensor([-1.0, -3.0])]
    got = [want[0], want[1] + torch.tensor([0.0, 0.5])]
    for scale in (1.0, 1e-2):
        gap = distance([each * scale for each in got], [each * scale for each in want])
        assert gap == pytest.approx((0.25, 0.5), rel=1e-3)
    assert distance(want, want) == (0, 0)


def test_a_log_probability_that_is_not_a_number_is_infinitely_far() -> None:
    want = torch.tensor([-1.0, -3.0])
    for got in (torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -math.inf])):
        assert distance([got, want], [want, want]) == (math.inf, math.inf)
        assert distance([want, got], [want, want]) == (math.inf, math.inf)


def test_equal_log_probabilities_are_compared_up_to_their_rounding() -> None:
    want = torch.full((4,), -4.0)
    assert distance([want.nextafter(torch.zeros(4))], [want]).worst < TINY_TOLERANCE
    assert distance([want + 1e-4], [want]).worst > 1


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "FalconH1", "Gemma3nText"])
def test_a_model_of_16_bits_computes_in_float32_with_its_own_weights(family: str) -> None:
    model = family_model(family)
    torch.nn.Module.to(model, torch.bfloat16)
    before = {name: (each.dtype, each.clone()) for name, each in model.state_dict().items()}
    tokens = list(range(3, 20))
    with in_float32(model):
        got = plain_logprobs(model, tokens)
    after = model.state_dict()
    assert all(after[name].dtype == dtype for name, (dtype, _) in before.items())
    assert all(torch.equal(after[name], each) for name, (_, each) in before.items())
    torch.nn.Module.float(model)  # in place
    assert torch.equal(got, plain_logprobs(model, tokens))
