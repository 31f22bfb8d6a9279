"""Every policy through any order of moves: what it promises holds after each of them."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offbeat.controller.events import ReturnKind
from offbeat.controller.ledger import GroupRecord
from offbeat.sampler.checked_sampler import CheckedSampler
from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import Sampler, earliest_step
from offbeat.sampler.ready_first import ReadyFirst
from offbeat.sampler.weight_fifo import WeightFifo
from offbeat.sampler.windowed import Windowed
from tests.support.sampler_bench import ENGINES, SamplerBench, step_of

PICK = st.integers(0, 20)
ENGINE = st.integers(0, ENGINES - 1)
SOME = settings(max_examples=60, stateful_step_count=60)


def step_sizes(run: SamplerBench) -> Iterator[tuple[int, int]]:
    """The version each step to come is trained at, and the places it has."""
    yield run.trainer_version, max(0, run.groups_needed)
    for version in itertools.count(run.trainer_version + 1):
        yield version, run.groups_per_step - run.view.batch_deficits.get(version + 1, 0)


def all_can_be_trained(run: SamplerBench, expiries: Iterable[int]) -> bool:
    """Earliest deadline first, step by step: the schedule that works if any does."""
    left = sorted(expiries)
    steps = step_sizes(run)
    while left:
        version, places = next(steps)
        if left[0] < version:
            return False
        left = left[places:]
    return True


class Moves(RuleBasedStateMachine):
    """The moves of a run, and what holds for every policy."""

    discards = False
    policy: Sampler

    def make(self, groups_per_step: int, max_staleness: int, lookahead: int) -> Sampler:
        raise NotImplementedError

    @initialize(
        groups_per_step=st.integers(1, 3), staleness=st.integers(0, 3), lookahead=st.integers(0, 3)
    )
    def begin(self, groups_per_step: int, staleness: int, lookahead: int) -> None:
        self.policy = self.make(groups_per_step, staleness, lookahead)
        guarded = CheckedSampler(
            self.policy, "policy", staleness, self.policy.max_outstanding_groups
        )
        self.run = SamplerBench(guarded, groups_per_step)
        self.staleness = staleness

    def picked(self, groups: Sequence[GroupRecord], pick: int) -> GroupRecord:
        return groups[pick % len(groups)]

    # --- rollouts --------------------------------------------------------------------------------

    @rule(engine=ENGINE, many=st.integers(1, 4))
    def admit(self, engine: int, many: int) -> None:
        for _ in range(many):
            if self.run.admit(engine):
                self.after_admission()

    @rule(engine=ENGINE, many=st.integers(1, 9))
    def dispatch_again(self, engine: int, many: int) -> None:
        for _ in range(many):
            group = self.run.due()
            if group is not None:
                self.run.dispatch(group, engine)

    @precondition(lambda self: self.run.in_flight)
    @rule(pick=PICK, begun_late=st.booleans())
    def commit(self, pick: int, begun_late: bool) -> None:
        self.run.commit(self.picked(self.run.in_flight, pick), begun_late=begun_late)

    @precondition(lambda self: self.run.in_flight)
    @rule()
    def commit_the_newest(self) -> None:
        self.run.commit(max(self.run.in_flight, key=lambda group: group.prompt_index))

    @precondition(lambda self: self.run.in_flight)
    @rule(pick=PICK)
    def retry(self, pick: int) -> None:
        group = self.picked(self.run.in_flight, pick)
        self.run.ledger.retry(group.prompt_index, ReturnKind.INFRASTRUCTURE, "engine_lost")

    @precondition(lambda self: self.run.in_flight)
    @rule(pick=PICK, shrink=st.booleans())
    def drop(self, pick: int, shrink: bool) -> None:
        run, group = self.run, self.picked(self.run.in_flight, pick)
        run.ledger.retry(group.prompt_index, ReturnKind.DATA, "reward_raised")
        step = step_of(group, run, self.staleness)
        shrink &= run.groups_per_step - run.view.batch_deficits.get(step, 0) > 1
        run.drop(group, step if shrink else 0)

    # --- the trainer and the weights -------------------------------------------------------------

    @rule()
    def claim(self) -> None:
        self.before_claim()
        claimed = self.run.claim()
        self.after_claim(claimed)

    @precondition(lambda self: self.run.ledger.training)
    @rule()
    def abort_the_step(self) -> None:
        self.run.ledger.unclaim(self.run.trainer_version + 1, 1)

    @rule(engine=ENGINE)
    def serve(self, engine: int) -> None:
        self.run.serve(engine)

    @rule()
    def sweep(self) -> None:
        self.run.evict()
        self.run.cancel(self.run.sampler.in_flight_to_cancel(self.run.view, predictive=True))

    @precondition(lambda self: self.run.trainer_version)
    @rule(steps=st.integers(1, 3))
    def rewind(self, steps: int) -> None:
        self.run.rewind(max(0, self.run.trainer_version - steps))

    # --- promises --------------------------------------------------------------------------------

    def after_admission(self) -> None:
        assert self.outstanding <= self.policy.max_outstanding_groups

    @property
    def outstanding(self) -> int:
        return self.run.view.outstanding + len(self.run.ledger.training)

    def before_claim(self) -> None: ...

    def after_claim(self, claimed: list[GroupRecord]) -> None: ...

    @invariant()
    def nothing_is_trained_past_the_bound(self) -> None:
        assert all(0 <= each <= self.staleness for each in self.run.staleness)

    @invariant()
    def a_policy_that_discards_nothing_never_has_to(self) -> None:
        if not self.discards:
            assert self.run.sampler.stale(self.run.view) == []
            assert self.run.sampler.in_flight_to_cancel(self.run.view, predictive=True) == []

    trains_all = True

    def teardown(self) -> None:
        """From wherever the moves led, once nothing fails any more every group is trained."""
        if not hasattr(self, "run"):
            return
        run = self.run
        left = set(run.ledger.groups)
        rounds = len(left) // run.groups_per_step + 12
        for _ in range(rounds):
            before = run.trainer_version
            run.round()
            assert run.trainer_version == before + 1, "the step in progress was completed"
        if self.trains_all:
            assert not left & set(run.ledger.groups)
        assert all(0 <= each <= self.staleness for each in run.staleness)


class InOrderMoves(Moves):
    def make(self, groups_per_step: int, max_staleness: int, lookahead: int) -> Sampler:
        self.lookahead = min(lookahead, max_staleness)
        return InOrder(groups_per_step, max_staleness, self.lookahead)

    def after_admission(self) -> None:
        """Since a rewind, groups may wait for steps beyond the look-ahead."""
        last = self.run.trainer_version + 1 + self.lookahead
        beyond = sum(
            count
            for target_step, count in self.run.view.outstanding_by_target_step.items()
            if earliest_step(target_step) > last
        )
        assert self.outstanding - beyond <= self.policy.max_outstanding_groups

    def before_claim(self) -> None:
        self.step = self.run.trainer_version + 1

    def after_claim(self, claimed: list[GroupRecord]) -> None:
        prompt_indices = [group.prompt_index for group in claimed]
        assert prompt_indices == sorted(prompt_indices)
        assert all(group.target_step == self.step for group in claimed)


class StoppedInOrderMoves(InOrderMoves):
    """A step may end early. What it leaves behind may have to be rolled out again."""

    discards = True

    def after_admission(self) -> None:
        """Since a rewind, a step that went short may want prompts that nobody waits for."""

    @precondition(lambda self: self.run.ledger.training)
    @rule()
    def stop(self) -> None:
        self.run.stop()
        self.sweep()

    def after_claim(self, claimed: list[GroupRecord]) -> None:
        assert all(earliest_step(group.target_step) <= self.step for group in claimed)
        self.sweep()


class PacedMoves(Moves):
    def expiries(self) -> list[int]:
        versions = (v for v, count in self.run.view.versions.items() for _ in range(count))
        return [version + self.staleness for version in versions]

    @invariant()
    def every_group_can_still_be_trained_in_time(self) -> None:
        assert all_can_be_trained(self.run, self.expiries())

    @invariant()
    def a_prompt_is_admitted_if_and_only_if_it_has_a_place(self) -> None:
        run = self.run
        last = run.serving_version + self.staleness
        fresh = [last] * (run.view.waiting + 1)
        admits = self.policy.admit(run.view) is not None
        if admits:
            assert all_can_be_trained(run, self.expiries() + fresh)
        elif all(version <= run.serving_version for version in run.view.versions):
            assert not all_can_be_trained(run, self.expiries() + fresh)


class ReadyFirstMoves(PacedMoves):
    def make(self, groups_per_step: int, max_staleness: int, lookahead: int) -> Sampler:
        return ReadyFirst(groups_per_step, max_staleness)

    def before_claim(self) -> None:
        """By hand: in arrival order, whoever leaves all the others a place."""
        run, want, expiries = self.run, list[int](), self.expiries()
        for prompt_index, group in run.view.ready.items():
            rest = list(expiries)
            rest.remove(group.oldest_version + self.staleness)
            later = [run.trainer_version] * (len(want) + 1)  # taken now: they hold places
            if len(want) < run.groups_needed and all_can_be_trained(run, rest + later):
                want.append(prompt_index)
                expiries = rest
        assert self.policy.select(run.view) == want


class WeightFifoMoves(PacedMoves):
    def make(self, groups_per_step: int, max_staleness: int, lookahead: int) -> Sampler:
        return WeightFifo(groups_per_step, max_staleness)

    def before_claim(self) -> None:
        self.groups_needed = self.run.groups_needed

    def after_claim(self, claimed: list[GroupRecord]) -> None:
        versions = [group.oldest_version for group in claimed]
        assert versions == sorted(versions)
        in_flight = [group.oldest_version for group in self.run.in_flight]
        ready = [group.oldest_version for group in self.run.view.ready.values()]
        assert all(claimed <= other for claimed in versions for other in in_flight + ready)
        if len(claimed) < self.groups_needed:
            assert all(any(older < version for older in in_flight) for version in ready)


class WindowedMoves(Moves):
    discards, trains_all = True, False
    freshest_first = False

    def make(self, groups_per_step: int, max_staleness: int, lookahead: int) -> Sampler:
        ratio = 1 + lookahead / 2
        return Windowed(groups_per_step, max_staleness, ratio, freshest_first=self.freshest_first)

    def before_claim(self) -> None:
        self.groups_needed, self.in_window = self.run.groups_needed, len(self.window())

    def after_claim(self, claimed: list[GroupRecord]) -> None:
        assert len(claimed) == min(max(0, self.groups_needed), self.in_window)

    def window(self) -> list[GroupRecord]:
        oldest = self.run.trainer_version - self.staleness
        return [g for g in self.run.ledger.ready.values() if g.oldest_version >= oldest]

    def in_turn(self, groups: list[GroupRecord]) -> list[GroupRecord]:
        arrived = sorted(groups, key=lambda group: group.arrival)
        if not self.freshest_first:
            return arrived
        return sorted(arrived, key=lambda group: -group.oldest_version)

    def is_trained_in_time(self, group: GroupRecord) -> bool:
        """It commits now, nothing else ever does, and steps are trained one after the other."""
        last = max((g.arrival for g in self.window()), default=0) + 1
        committed = GroupRecord(group.prompt_index, group.target_step, arrival=last)
        committed.oldest_version = group.oldest_version
        left = [*self.window(), committed]
        for version, places in step_sizes(self.run):
            left = self.in_turn([g for g in left if g.oldest_version + self.staleness >= version])
            if committed not in left:
                return False
            if committed in left[:places]:
                return True
            left = left[places:]
        raise AssertionError("steps have no end")

    @invariant()
    def who_is_predicted_to_be_too_late_is_too_late(self) -> None:
        predictive = self.policy.in_flight_to_cancel(self.run.view, predictive=True)
        surely = self.policy.in_flight_to_cancel(self.run.view, predictive=False)
        assert set(surely) <= set(predictive)
        for group in self.run.in_flight:
            late = group.oldest_version + self.staleness < self.run.trainer_version
            assert late == (group.prompt_index in surely)
            if group.prompt_index in predictive:
                assert not self.is_trained_in_time(group)
            elif self.freshest_first:
                assert self.is_trained_in_time(group), "nobody else is cancelled"

    @invariant()
    def what_is_stale_is_past_the_bound_and_all_that_is_past_it_is_stale(self) -> None:
        stale = set(self.run.sampler.stale(self.run.view))
        window = {group.prompt_index for group in self.window()}
        assert stale == set(self.run.view.ready) - window


class FreshestFirstMoves(WindowedMoves):
    freshest_first = True

    def after_claim(self, claimed: list[GroupRecord]) -> None:
        super().after_claim(claimed)
        left = [group.oldest_version for group in self.run.view.ready.values()]
        assert all(group.oldest_version >= other for group in claimed for other in left)


for _machine in (
    InOrderMoves,
    StoppedInOrderMoves,
    ReadyFirstMoves,
    WeightFifoMoves,
    WindowedMoves,
    FreshestFirstMoves,
):
    _machine.TestCase.settings = SOME

TestInOrder = InOrderMoves.TestCase
TestStoppedInOrder = StoppedInOrderMoves.TestCase
TestReadyFirst = ReadyFirstMoves.TestCase
TestWeightFifo = WeightFifoMoves.TestCase
TestWindowed = WindowedMoves.TestCase
TestFreshestFirst = FreshestFirstMoves.TestCase
