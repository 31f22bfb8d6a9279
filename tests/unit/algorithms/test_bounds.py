"""What each bound does to one token, or to one sequence."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import tokens_of

from offbeat.algorithms.corrections import correction
from offbeat.algorithms.losses import LOSSES, LossTokens
from offbeat.algorithms.tokens import valid_tokens
from offbeat.config.sections.loss import (
    CispoLossConfig,
    ClippedPgLossConfig,
    GspoLossConfig,
    LossConfig,
    SftLossConfig,
)

log_ratios = st.floats(-5, 5)
advantages = st.floats(0.01, 10) | st.floats(-10, -0.01)


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


def pull(config: LossConfig, log_ratio: list[float], advantage: float) -> list[float]:
    """The gradient's size at each token, positive where the token is made likelier."""
    tokens = one_sequence(log_ratio, advantage)
    LOSSES[config.name](tokens, config).loss.backward()
    assert tokens.logprobs_N.grad is not None
    return [-each for each in tokens.logprobs_N.grad.tolist()]


@given(log_ratio=log_ratios, advantage=advantages)
def test_a_clipped_token_pulls_no_further(log_ratio: float, advantage: float) -> None:
    config, r = ClippedPgLossConfig(clip_low=0.2, clip_high=0.5), math.exp(log_ratio)
    (got,) = pull(config, [log_ratio], advantage)
    gone = (advantage > 0 and r > 1.5) or (advantage < 0 and r < 0.8)
    assert got == pytest.approx(0 if gone else r * advantage)


@given(log_ratio=log_ratios, advantage=advantages)
def test_dual_clip_bounds_how_hard_a_token_is_pushed_down(
    log_ratio: float, advantage: float
) -> None:
    config = ClippedPgLossConfig(clip_low=0.2, clip_high=0.5, dual_clip=3.0)
    (got,), (plain,) = (
        pull(each, [log_ratio], advantage) for each in (config, ClippedPgLossConfig(clip_high=0.5))
    )
    gone = advantage < 0 and math.exp(log_ratio) > 3
    assert got == (0 if gone else plain)
    assert got >= -3 * abs(advantage) - 1e-9


@given(ratios=st.lists(log_ratios, min_size=1, max_size=6), advantage=advantages)
def test_gspo_clips_whole_sequences(ratios: list[float], advantage: float) -> None:
    config = GspoLossConfig(clip_low=0.2, clip_high=0.5, normalize="sequences")
    got, s = pull(config, ratios, advantage), math.exp(sum(ratios) / len(ratios))
    gone = (advantage > 0 and s > 1.5) or (advantage < 0 and s < 0.8)
    want = 0 if gone else s * advantage / len(ratios)
    assert got == pytest.approx([want] * len(ratios))


@given(log_ratio=log_ratios, advantage=advantages)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(log_ratio: float, advantage: float) -> None:
    config = CispoLossConfig(clip_low=0.4, clip_high=0.5)
    (got,) = pull(config, [log_ratio], advantage)
    assert 0.6 * abs(advantage) <= abs(got) * (1 + 1e-12)
    assert abs(got) <= 1.5 * abs(advantage) * (1 + 1e-12)
    assert math.copysign(1, got) == math.copysign(1, advantage)


@given(log_ratio=log_ratios, advantage=advantages)
def test_imitation_reads_neither_ratio_nor_advantage(log_ratio: float, advantage: float) -> None:
    assert pull(SftLossConfig(), [log_ratio], advantage) == [1]


def weights(config: ClippedPgLossConfig, seed: int) -> torch.Tensor:
    tokens = tokens_of(seed)
    weight = correction(valid_tokens(tokens, config.old_logprobs), config).weight_N
    assert weight is not None and not weight.requires_grad
    return weight[tokens.mask_N]


@given(seed=st.integers(0, 1000), cap=st.floats(0.5, 2))
def test_truncated_weights_stay_under_their_cap(seed: int, cap: float) -> None:
    assert (weights(ClippedPgLossConfig(old_logprobs="policy", tis_cap=cap), seed) <= cap).all()


@given(seed=st.integers(0, 1000), low=st.floats(0, 0.99), high=st.floats(1.01, 3))
def test_weights_are_inside_the_band_or_nothing(seed: int, low: float, high: float) -> None:
    got = weights(ClippedPgLossConfig(old_logprobs="policy", icepop_band=(low, high)), seed)
    assert ((got == 0) | ((got >= low) & (got <= high))).all()


@given(seed=st.integers(0, 1000), statistic=st.sampled_from(["geometric", "product"]))
def test_a_sequence_is_dropped_whole_or_kept_whole(
    seed: int, statistic: Literal["geometric", "product"]
) -> None:
    tokens = tokens_of(seed)
    config = ClippedPgLossConfig(
        old_logprobs="policy", sequence_band=(0.9, 1.1), sequence_statistic=statistic
    )
    got = correction(valid_tokens(tokens, config.old_logprobs), config).weight_N
    assert got is not None
    for s in range(tokens.sequences):
        own = got[tokens.sequence_N == s]
        assert set(own.tolist()) <= {0.0} or set(own.tolist()) <= {1.0}


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
