"""Every policy through any order of moves: what it promises holds after each of them."""

from hypothesis.stateful import invariant, precondition, rule

from offbeat.controller.ledger import GroupRecord
from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import Sampler, earliest_step
from offbeat.sampler.ready_first import ReadyFirst, WeightFifo
from offbeat.sampler.windowed import Windowed
from tests.support.sampler_moves import SOME, Moves, all_can_be_trained, step_sizes


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
    rounds_per_step = 3
    """If a rewind undoes a step that went short, groups of later steps can fill the room. The step
    then gets each prompt that it lacks only after it has claimed a group that was ready."""

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
