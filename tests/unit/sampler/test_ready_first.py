"""The places ready_first keeps, against trying every schedule on small states."""

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.controller.group_moves import Place
from offbeat.controller.ledger import GroupRecord
from offbeat.sampler.ready_first import ReadyFirst
from offbeat.testing.samplers import SamplerBench

NOW = 3  # the trainer's version


def schedulable(expiries: list[int], sizes: list[int]) -> bool:
    """Step by step from ``NOW`` on, the groups that expire first go first."""
    left = sorted(expiries)
    for version in count(NOW):
        if not left:
            return True
        if left[0] < version:
            return False
        left = left[sizes[version - NOW] if version - NOW < len(sizes) else sizes[-1] :]
    raise AssertionError("steps have no end")


@st.composite
def runs(draw: st.DrawFn) -> SamplerBench:
    """Any ready groups and groups in flight, any groups_needed; whether they can all be trained or not."""
    groups_per_step, staleness = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    run = SamplerBench(ReadyFirst(groups_per_step, staleness), groups_per_step)
    ledger = run.ledger
    ledger.trainer_version = NOW
    run.engines = [draw(st.integers(NOW - staleness, NOW))] * 2
    for step in range(NOW + 1, NOW + 4):
        if without := draw(st.integers(0, groups_per_step - 1)):
            ledger.batch_deficits[step] = without
    versions = st.integers(NOW - staleness - 1, run.serving_version)
    for version, is_ready in draw(st.lists(st.tuples(versions, st.booleans()), max_size=12)):
        group = ledger.groups[ledger.admit(None)]
        ledger.dispatch(group.prompt_index, "generator-0", version)
        if is_ready:
            run.commit(group)
    for _ in range(draw(st.integers(0, 2))):
        ledger.admit(None)
    return run


def expiries(run: SamplerBench, staleness: int) -> list[int]:
    started = [g for g in run.ledger.groups.values() if g.place is not Place.ADMITTED]
    found = [g.oldest_version + staleness for g in started]
    return [expiry for expiry in found if expiry >= NOW]  # others are past the bound


def sizes(run: SamplerBench, taken: int = 0) -> list[int]:
    whole = run.groups_per_step
    later = [whole - run.view.batch_deficits.get(step, 0) for step in range(NOW + 2, NOW + 5)]
    return [run.groups_needed - taken, *later, whole]


@settings(max_examples=400)
@given(runs())
def test_a_ready_group_is_taken_if_and_only_if_all_others_can_still_be_trained(
    run: SamplerBench,
) -> None:
    staleness = run.sampler.max_staleness
    left, want = expiries(run, staleness), list[int]()
    if not schedulable(left, sizes(run)):
        return
    for group in run.view.ready.values():
        expiry = group.oldest_version + staleness
        if expiry < NOW or len(want) == run.groups_needed:
            continue
        rest = list(left)
        rest.remove(expiry)
        if schedulable(rest, sizes(run, len(want) + 1)):
            want.append(group.prompt_index)
            left = rest
    assert run.sampler.select(run.view) == want


@settings(max_examples=400)
@given(runs())
def test_a_prompt_is_admitted_if_and_only_if_all_can_be_trained_with_it(run: SamplerBench) -> None:
    staleness = run.sampler.max_staleness
    last_versions, last = expiries(run, staleness), run.serving_version + staleness
    past = len(run.ledger.groups) - run.view.waiting - len(last_versions)
    if past or not schedulable(last_versions + [last] * run.view.waiting, sizes(run)):
        return
    fits = schedulable(last_versions + [last] * (run.view.waiting + 1), sizes(run))
    assert (run.sampler.admit(run.view) is not None) == fits


def test_when_not_all_can_be_trained_the_oldest_go_first() -> None:
    run = SamplerBench(ReadyFirst(groups_per_step=2, max_staleness=1), 2)
    run.ledger.trainer_version = 1
    for version in (1, 0, 0, 0):
        group: GroupRecord = run.ledger.groups[run.ledger.admit(None)]
        run.ledger.dispatch(group.prompt_index, "generator-0", version)
        run.commit(group)
    assert run.sampler.select(run.view) == [1, 2]


def test_the_last_free_place_may_go_to_an_older_group_than_it_was_free_for() -> None:
    run = SamplerBench(ReadyFirst(groups_per_step=2, max_staleness=2), 2)
    run.ledger.trainer_version = 2
    for version in (0, 1, 2):
        group = run.ledger.groups[run.ledger.admit(None)]
        run.ledger.dispatch(group.prompt_index, "generator-0", version)
        if version:
            run.commit(group)
    assert run.sampler.select(run.view) == [1], "one place is kept for the group of version 0"
