"""What each policy does, by example, and what it costs."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offbeat.controller.events import ReturnKind
from offbeat.controller.ledger import GroupRecord
from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import Admission, Sampler
from offbeat.sampler.ready_first import ReadyFirst, WeightFifo
from offbeat.sampler.windowed import Windowed
from offbeat.testing.samplers import SamplerBench

G = 2  # groups per step
POLICIES: list[Callable[[int], Sampler]] = [
    lambda staleness: InOrder(G, staleness, staleness),
    lambda staleness: ReadyFirst(G, staleness),
    lambda staleness: WeightFifo(G, staleness),
    lambda staleness: Windowed(G, staleness),
]


def freshest(staleness: int) -> Sampler:
    return Windowed(G, staleness, freshest_first=True)


def train(run: SamplerBench, steps: int) -> None:
    """Let it train on, with fresh weights served after each step."""
    for _ in range(steps):
        run.round()


def admitted(run: SamplerBench, groups: int, engine: int = 0) -> list[GroupRecord]:
    """So many more groups, in flight."""
    found = [run.admit(engine) for _ in range(groups)]
    return [group for group in found if group is not None]


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("staleness", range(4))
def test_a_fast_generator_uses_the_whole_bound(
    make: Callable[[int], Sampler], staleness: int
) -> None:
    run = SamplerBench(make(staleness), G)
    train(run, 12)
    assert run.trainer_version == 12
    assert max(run.staleness) == staleness


@pytest.mark.parametrize("make", POLICIES)
def test_without_staleness_nothing_is_generated_while_a_whole_step_is_in_training(
    make: Callable[[int], Sampler],
) -> None:
    run = SamplerBench(make(0), G)
    for group in admitted(run, G):
        run.commit(group)
    run.ledger.claim(run.sampler.select(run.view), 1, 1)
    assert run.groups_needed == 0
    assert run.sampler.admit(run.view) is None


@pytest.mark.parametrize("make", POLICIES)
def test_after_a_rewind_waiting_groups_go_out_as_there_is_room(
    make: Callable[[int], Sampler],
) -> None:
    run = SamplerBench(make(1), G)
    train(run, 5)
    run.rewind(1)
    reach = run.sampler.max_outstanding_groups
    assert run.view.outstanding > reach
    while group := run.due():
        run.dispatch(group)
    assert run.view.outstanding - run.view.waiting == reach
    assert run.view.waiting > 0
    assert run.sampler.admit(run.view) is None


# --- in_order ------------------------------------------------------------------------------------


def test_in_order_admits_the_nearest_step_that_is_not_full() -> None:
    run = SamplerBench(InOrder(G, max_staleness=3, max_lookahead=2), G)
    groups = admitted(run, 9)
    assert [group.target_step for group in groups] == [1, 1, 2, 2, 3, 3], (
        "the look-ahead is two batches"
    )
    run.ledger.retry(groups[2].prompt_index, ReturnKind.DATA, "reward_raised")
    run.drop(groups[2])
    assert run.sampler.admit(run.view) == Admission(2)


def test_in_order_trains_groups_of_another_sampler_that_no_step_waits_for_first() -> None:
    run = SamplerBench(InOrder(G, max_staleness=1, max_lookahead=1), G)
    bound = admitted(run, 1)
    unbound = run.ledger.groups[run.ledger.admit(None)]
    assert run.sampler.may_dispatch(run.view, unbound)
    run.dispatch(unbound)
    assert run.sampler.admit(run.view) == Admission(2), "the unbound group takes a place of step 1"
    for group in (*bound, unbound):
        run.commit(group)
    assert run.sampler.select(run.view) == [unbound.prompt_index, bound[0].prompt_index]


def test_in_order_claims_by_prompt_index_whatever_came_first() -> None:
    run = SamplerBench(InOrder(G, max_staleness=1, max_lookahead=1), G)
    first, second, third, _ = admitted(run, 4)
    for group in (third, second, first):
        run.commit(group)
    assert run.sampler.select(run.view) == [first.prompt_index, second.prompt_index]


def test_in_order_trains_first_what_a_stopped_step_left_behind() -> None:
    run = SamplerBench(InOrder(G, max_staleness=1, max_lookahead=1), G)
    first, second, third, fourth = admitted(run, 4)
    run.commit(first)
    run.claim()
    run.stop()
    for group in (fourth, third, second):
        run.commit(group)
    assert (second.target_step, third.target_step, fourth.target_step) == (1, 2, 2)
    assert run.sampler.select(run.view) == [second.prompt_index, third.prompt_index]
    run.serve(0)
    run.serve(1)
    assert [group.target_step for group in admitted(run, 9)] == [3], (
        "the fourth holds the other place"
    )


def test_a_group_that_comes_back_waits_for_weights_that_are_fresh_enough() -> None:
    run = SamplerBench(InOrder(G, max_staleness=1, max_lookahead=1), G)
    train(run, 1)
    run.engines = [1, 1]
    late, _ = admitted(run, 2)
    assert late.target_step == 3
    run.rewind(0)
    assert not run.sampler.may_dispatch(run.view, late), (
        "step 3 trains at version 2, version 0 is served"
    )
    train(run, 1)
    assert not run.sampler.may_dispatch(run.view, late)
    run.engines = [1, 1]
    assert run.sampler.may_dispatch(run.view, late)


def with_old_in_flight(sampler: Sampler, drawn: int) -> tuple[SamplerBench, list[GroupRecord]]:
    """A run with a step of version 0, groups of this version in flight, and ready ones of 1."""
    run = SamplerBench(sampler, G)
    old, *rest = admitted(run, drawn)
    for group in rest[:G]:
        run.commit(group)
    run.claim()
    run.serve(0)
    run.serve(1)
    for group in admitted(run, 2):
        run.commit(group)
    return run, [old, *rest[G:]]


# --- ready_first ---------------------------------------------------------------------------------


def test_ready_first_keeps_a_place_for_the_oldest_in_flight() -> None:
    run, (old, late) = with_old_in_flight(ReadyFirst(G, max_staleness=1), drawn=4)
    assert old.oldest_version == 0
    assert run.sampler.select(run.view) == [], "both places belong to the two groups of version 0"
    run.commit(late)
    assert run.sampler.select(run.view) == [late.prompt_index]


def test_ready_first_takes_what_came_first_when_there_is_room_for_all() -> None:
    run = SamplerBench(ReadyFirst(G, max_staleness=3), G)
    groups = admitted(run, 6)
    for group in reversed(groups):
        run.commit(group)
    assert run.sampler.select(run.view) == [5, 4]


@pytest.mark.parametrize(("short", "stale"), [(3, []), (2, [3])])
def test_a_dropped_prompt_shortens_the_last_step_it_could_have_been_in_or_somebody_is_late(
    short: int, stale: list[int]
) -> None:
    run = SamplerBench(ReadyFirst(G, max_staleness=1), G)
    old = admitted(run, 4)
    for group in old[:G]:
        run.commit(group)
    run.claim()
    run.engines = [1, 1]
    dropped = admitted(run, 2)[0]
    run.ledger.retry(dropped.prompt_index, ReturnKind.DATA, "reward_raised")
    run.drop(dropped, short)  # step 2 is in progress, and two groups can be trained in no other
    for group in old[G:]:
        run.commit(group)
    run.claim()
    assert run.sampler.stale(run.view) == stale


# --- weight_fifo ---------------------------------------------------------------------------------


def test_weight_fifo_waits_for_the_oldest_version_in_flight() -> None:
    run, (old, *others) = with_old_in_flight(WeightFifo(G, max_staleness=2), drawn=6)
    assert run.sampler.select(run.view) == []
    run.commit(others[1])
    assert run.sampler.select(run.view) == [others[1].prompt_index], "of the oldest version itself"
    for group in (others[0], others[2], old):
        run.commit(group)
    assert run.sampler.select(run.view) == [others[1].prompt_index, others[0].prompt_index]


# --- windowed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freshest_first", "chosen"), [(False, [0, 1]), (True, [2, 3])])
def test_windowed_takes_the_first_to_arrive_or_the_freshest(
    freshest_first: bool, chosen: list[int]
) -> None:
    run = SamplerBench(Windowed(G, 1, 2.0, freshest_first=freshest_first), G)
    old = admitted(run, 2)
    run.engines[1] = run.trainer_version + 1  # a faster engine
    fresh = admitted(run, 2, engine=1)
    for group in (*old, *fresh):
        run.commit(group)
    assert run.sampler.select(run.view) == chosen


def test_windowed_over_samples_and_evicts_what_is_late() -> None:
    run = SamplerBench(Windowed(G, max_staleness=0, over_sampling_ratio=1.5), G)
    assert len(admitted(run, 9)) == run.sampler.max_outstanding_groups == 3
    for group in run.in_flight:
        run.commit(group)
    run.claim()
    assert run.sampler.stale(run.view) == [2]


def test_windowed_foresees_who_comes_too_late() -> None:
    run = SamplerBench(Windowed(G, max_staleness=1, over_sampling_ratio=2.0), G)
    groups = admitted(run, 8)
    for group in groups[:3]:
        run.commit(group)
    assert run.sampler.in_flight_to_cancel(run.view, predictive=True) == [], (
        "one place is left in the second step"
    )
    run.commit(groups[3])
    assert run.sampler.in_flight_to_cancel(run.view, predictive=True) == [4, 5, 6, 7]
    assert run.sampler.in_flight_to_cancel(run.view, predictive=False) == []


def test_windowed_generates_nothing_that_would_be_too_old_at_once() -> None:
    run = SamplerBench(Windowed(1, max_staleness=0), 1)
    run.commit(admitted(run, 1)[0])
    run.claim()
    assert run.trainer_version == 1
    assert run.sampler.admit(run.view) is None, "version 0 is still served"
    run.engines = [1, 1]
    assert run.sampler.admit(run.view) is not None


# --- cost ----------------------------------------------------------------------------------------


class Counted(OrderedDict[int, GroupRecord]):
    """Counts the groups that somebody walks over."""

    walked = 0

    def __iter__(self) -> Iterator[int]:
        for prompt_index in super().__iter__():
            self.walked += 1
            yield prompt_index

    def values(self) -> Any:
        return (self[prompt_index] for prompt_index in self)


@pytest.mark.parametrize("make", [*POLICIES, freshest])
def test_what_a_policy_looks_at_does_not_grow_with_the_groups_outstanding(
    make: Callable[[int], Sampler],
) -> None:
    walked = list[int]()
    for groups in (20, 2000):
        run = SamplerBench(make(3), G)
        ledger = run.ledger
        for prompt_index in range(groups):
            group = ledger.groups[ledger.admit(1 + prompt_index // G)]
            run.engines[0] = prompt_index * 2 // groups  # the older half of version 0
            run.dispatch(group)
            if prompt_index % 2 == 0:
                run.commit(group)
        ledger.ready = Counted(ledger.ready)
        for index in (ledger.ready_at, ledger.in_flight_at):
            index.update({version: Counted(groups) for version, groups in index.items()})
        ledger.ready_for.update(
            {step: Counted(groups) for step, groups in ledger.ready_for.items()}
        )
        run.sampler.select(run.view)
        run.sampler.admit(run.view)
        run.sampler.stale(run.view)
        run.sampler.in_flight_to_cancel(run.view, predictive=False)
        indices = (ledger.ready_at, ledger.ready_for, ledger.in_flight_at)
        indexed = [ledger.ready, *(groups for index in indices for groups in index.values())]
        walked.append(sum(each.walked for each in indexed if isinstance(each, Counted)))
    assert walked[0] == walked[1] <= 2 * G + 2


def test_ready_first_skips_a_version_that_has_to_wait_as_a_whole() -> None:
    run = SamplerBench(ReadyFirst(G, max_staleness=0), G)
    admitted(run, 1)
    run.engines = [1, 1]
    for _ in range(1000):
        group = run.ledger.groups[run.ledger.admit(None)]
        run.dispatch(group)
        run.commit(group)
    newer = run.ledger.ready_at[1] = Counted(run.ledger.ready_at[1])
    assert run.sampler.select(run.view) == [1], "the other place is for the older group in flight"
    assert newer.walked <= 2
