"""Which finished groups are refused, and that a step is not refused everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from offbeat.config.sections.sampler import FilterConfig
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.groups import Receipt, SampleStatus
from offbeat.sampler.filters import GroupFilter


def finished(rewards: tuple[float, ...], reasons: tuple[str, ...] = ()) -> Receipt:
    samples = len(rewards)
    return make_receipt(
        0, 1, (((0, 2),),) * samples, rewards=rewards, finish_reasons=reasons or ("stop",) * samples
    )


FLAT, VARIED = finished((1.0, 1.0)), finished((0.0, 1.0))


def test_without_filters_everything_is_kept() -> None:
    keeps = GroupFilter(FilterConfig(), 2)
    assert keeps.refusal(FLAT, 1) is None
    assert keeps.refusal(finished((0.0, 1.0), ("length", "length")), 1) is None


def test_a_group_whose_samples_got_the_same_reward_has_no_variance() -> None:
    filters = GroupFilter(FilterConfig(zero_variance=True), 2)
    assert filters.refusal(FLAT, 1) == "zero_variance"
    assert filters.refusal(VARIED, 1) is None
    assert filters.refusal(finished((-0.5,) * 8), 1) == "zero_variance"


def test_a_masked_sample_makes_a_group_neither_varied_nor_truncated() -> None:
    statuses = (SampleStatus.VALID, SampleStatus.VALID, SampleStatus.MASKED)
    group = replace(finished((1.0, 1.0, 0.0), ("stop", "stop", "deadline")), statuses=statuses)
    assert GroupFilter(FilterConfig(zero_variance=True), 2).refusal(group, 1) == "zero_variance"
    cut = replace(group, truncated_turns=(0, 0, 1))
    assert GroupFilter(FilterConfig(max_truncated_fraction=0.0), 2).refusal(cut, 1) is None


@given(samples=st.integers(1, 100), data=st.data())
def test_a_group_is_truncated_when_more_than_the_share_allowed_ran_out_of_tokens(
    samples: int, data: st.DataObject
) -> None:
    allowed, cut = data.draw(st.integers(0, samples)), data.draw(st.integers(0, samples))
    filters = GroupFilter(FilterConfig(max_truncated_fraction=allowed / samples), 2)
    reasons = ("length",) * cut + ("stop",) * (samples - cut)
    refused = filters.refusal(finished((1.0,) * samples, reasons), 1)
    assert (refused == "truncated") == (cut > allowed)


def test_a_group_that_is_both_is_counted_by_the_cause() -> None:
    filters = GroupFilter(FilterConfig(zero_variance=True, max_truncated_fraction=0), 2)
    assert filters.refusal(finished((0.0, 0.0), ("length", "length")), 1) == "truncated"


@pytest.mark.parametrize(
    ("config", "limit"),
    [(FilterConfig(zero_variance=True), 30), (FilterConfig(zero_variance=True, max_per_step=2), 2)],
)
def test_beyond_the_limit_of_its_step_a_group_is_kept_whatever_it_is(
    config: FilterConfig, limit: int
) -> None:
    filters = GroupFilter(config, 3)
    refused = [filters.refusal(FLAT, 1) for _ in range(limit + 5)]
    assert refused == ["zero_variance"] * limit + [None] * 5
    assert filters.filtered(1) == limit


def test_each_step_has_its_own_limit_and_a_kept_group_does_not_count() -> None:
    filters = GroupFilter(FilterConfig(zero_variance=True, max_per_step=1), 3)
    assert filters.refusal(VARIED, 1) is None
    assert filters.refusal(FLAT, 1) == "zero_variance"
    assert filters.refusal(FLAT, 2) == "zero_variance"
    assert (filters.filtered(1), filters.filtered(2), filters.filtered(3)) == (1, 1, 0)
