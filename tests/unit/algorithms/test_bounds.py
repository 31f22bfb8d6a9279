"""What each bound does to one token, or to one sequence."""

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import tokens_of

from offbeat.algorithms.corrections import correction
from offbeat.algorithms.losses import LOSSES, LossTokens
from offbeat.algorithms.tokens import valid_tokens
from offbeat.config.sections.loss import (
    ClippedPgLossConfig,
)


def one_sequence(log_ratio: list[float], advantage: float) -> LossTokens:
    """Tokens whose old and generation logprobs are 0."""
    logprobs = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(len(log_ratio), dtype=torch.float64)
    return LossTokens(
        logprobs_N=logprobs,
        old_N=zero,
        generation_N=zero,
        reference_N=None,
        advantages_N=zero + advantage,
        mask_N=torch.ones(len(log_ratio), dtype=torch.bool),
        sequence_N=torch.zeros(len(log_ratio), dtype=torch.int64),
        sequences=1,
    )


def test_the_band_is_closed() -> None:
    tokens = one_sequence([0.0, 0.0, 0.0], 1.0)
    generation = -torch.tensor([2.0, 0.5, 2.0000001], dtype=torch.float64).log()
    tokens = replace(tokens, generation_N=generation)
    config = ClippedPgLossConfig(old_logprobs="policy", icepop_band=(0.5, 2.0))
    got = correction(valid_tokens(tokens, config.old_logprobs), config).weight_N
    assert got is not None and got.tolist() == pytest.approx([2.0, 0.5, 0.0])


def test_nothing_asked_for_is_no_weight_at_all() -> None:
    config = ClippedPgLossConfig(old_logprobs="policy")
    assert correction(valid_tokens(tokens_of(0), config.old_logprobs), config).weight_N is None


def test_a_long_sequence_leaves_a_product_band_that_a_short_one_stays_in() -> None:
    """The geometric mean does not depend on length."""
    kept = dict[tuple[str, int], float]()
    for statistic in ("product", "geometric"):
        for length in (2, 50):
            tokens = replace(
                one_sequence([0.0] * length, 1.0),
                generation_N=torch.full((length,), -0.02, dtype=torch.float64),
            )
            config = ClippedPgLossConfig(
                old_logprobs="policy", sequence_band=(0.5, 1.5), sequence_statistic=statistic
            )
            weight = correction(valid_tokens(tokens, config.old_logprobs), config).weight_N
            assert weight is not None
            kept[statistic, length] = float(weight[0])
    assert kept == {
        ("product", 2): 1,
        ("product", 50): 0,
        ("geometric", 2): 1,
        ("geometric", 50): 1,
    }


def test_old_logprobs_of_the_pass_itself_are_the_policys_own() -> None:
    tokens = tokens_of(0)
    recomputed = replace(
        tokens,
        old_N=tokens.logprobs_N.detach(),
        logprobs_N=tokens.logprobs_N.detach().clone().requires_grad_(),
    )
    config = ClippedPgLossConfig(old_logprobs="policy", tis_cap=1.2, sequence_band=(0.8, 1.3))
    current = ClippedPgLossConfig(old_logprobs="current", tis_cap=1.2, sequence_band=(0.8, 1.3))
    sums = [LOSSES["clipped_pg"](*each) for each in ((recomputed, config), (tokens, current))]
    for each in sums:
        each.loss.backward()
    assert sums[0].loss.item() == sums[1].loss.item()
    assert recomputed.logprobs_N.grad is not None and tokens.logprobs_N.grad is not None
    assert torch.equal(recomputed.logprobs_N.grad, tokens.logprobs_N.grad)


def test_a_sequences_sum_is_over_what_is_valid_of_it() -> None:
    """Whatever stands at the others, and whoever left them out."""
    tokens = replace(tokens_of(0, (3, 2)), mask_N=torch.tensor([True, True, False, True, True]))
    valid = valid_tokens(tokens)
    values = torch.tensor([1.0, 2.0, math.nan, 8.0, 16.0], dtype=torch.float64)
    assert valid.sequence_sums(values).tolist() == [3, 24]
    fewer = valid.without(torch.tensor([True, False, False, False, False]))
    assert fewer.sequence_sums(values).tolist() == [2, 24]
    assert (fewer.counts_S.tolist(), fewer.lengths_S.tolist()) == ([1, 2], [1, 2])
    none = valid.without(torch.tensor([True] * 5))
    assert (none.counts_S.tolist(), none.lengths_S.tolist()) == ([0, 0], [1, 1])
