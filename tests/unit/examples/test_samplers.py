"""The policies of other systems keep what a sampler promises, and do what their rule says."""

from collections.abc import Callable

import pytest

from examples.samplers.policies import CountingFifo, DiscardAtConsumption, ThresholdPerSync
from offbeat.sampler.policy import Sampler
from offbeat.testing.samplers import SamplerBench
from tests.support.sampler_moves import SOME, DiscardingMoves

G = 4


class CountingFifoMoves(DiscardingMoves):
    """With staleness 0 groups in flight that are too old may take all places: one round evicts them."""

    rounds_per_step = 2

    def make(self, groups_per_step: int, max_staleness: int, lookahead: int) -> Sampler:
        return CountingFifo(groups_per_step, max_staleness)


class DiscardAtConsumptionMoves(DiscardingMoves):
    """All its places may be taken by groups in flight that are too old: one round throws them away."""

    rounds_per_step = 2

    def make(self, groups_per_step: int, max_staleness: int, lookahead: int) -> Sampler:
        return DiscardAtConsumption(groups_per_step, max_staleness, 1.0 + lookahead)


class ThresholdPerSyncMoves(DiscardingMoves):
    def make(self, groups_per_step: int, max_staleness: int, lookahead: int) -> Sampler:
        return ThresholdPerSync(groups_per_step, max_staleness, lookahead / 2)


for _machine in (CountingFifoMoves, DiscardAtConsumptionMoves, ThresholdPerSyncMoves):
    _machine.TestCase.settings = SOME

TestCountingFifo = CountingFifoMoves.TestCase
TestDiscardAtConsumption = DiscardAtConsumptionMoves.TestCase
TestThresholdPerSync = ThresholdPerSyncMoves.TestCase


def begun(run: SamplerBench) -> int:
    """Return how many groups the policy lets begin now, all left in flight."""
    return sum(1 for _ in iter(run.admit, None))


@pytest.mark.parametrize("staleness", range(3))
def test_counting_lets_so_many_batches_begin_as_it_may_run_ahead(staleness: int) -> None:
    run = SamplerBench(CountingFifo(G, staleness), G)
    assert begun(run) == (staleness + 1) * G


@pytest.mark.parametrize(("threshold", "groups"), [(0.0, 4), (0.5, 6), (0.6, 6), (1.0, 8)])
def test_a_threshold_is_a_fraction_of_what_a_sync_trains(threshold: float, groups: int) -> None:
    run = SamplerBench(ThresholdPerSync(G, 2, threshold), G)
    assert begun(run) == groups


def test_a_threshold_counts_what_was_trained_since_the_engines_took_weights() -> None:
    run = SamplerBench(ThresholdPerSync(G, 3, 0.0, sync_interval=2), G)
    assert begun(run) == 2 * G
    for group in run.in_flight[:G]:
        run.commit(group)
    run.claim()
    assert begun(run) == 0, "four are in flight, and four were trained since the last sync"
    run.serve(0)
    run.serve(1)
    assert begun(run) == G


def test_what_is_too_old_is_thrown_away_when_a_step_asks_and_not_before() -> None:
    run = SamplerBench(DiscardAtConsumption(G, 0, ahead=3.0), G)
    assert begun(run) == 3 * G
    for group in run.in_flight:
        run.commit(group)
    run.claim()
    assert run.sampler.in_flight_to_cancel(run.view, predictive=True) == []
    assert len(run.sampler.stale(run.view)) == 2 * G


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DiscardAtConsumption(G, 1, 0.5), "ahead=0.5"),
        (lambda: ThresholdPerSync(G, 1, -0.1), "threshold=-0.1"),
    ],
)
def test_an_option_that_starves_the_steps_is_refused(
    make: Callable[[], Sampler], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make()
