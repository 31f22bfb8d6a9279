"""Moves of a run against a staleness policy, as a state machine: what holds for every policy."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offbeat.controller.events import ReturnKind
from offbeat.controller.ledger import GroupRecord
from offbeat.sampler.checked_sampler import CheckedSampler
from offbeat.sampler.policy import Sampler
from offbeat.testing.samplers import ENGINES, SamplerBench, find_step

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
        step = find_step(group, run, self.staleness)
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
    rounds_per_step = 1

    def teardown(self) -> None:
        """From wherever the moves led, once nothing fails any more every group is trained."""
        if not hasattr(self, "run"):
            return
        run = self.run
        left = set(run.ledger.groups)
        rounds = len(left) // run.groups_per_step + 12
        for _ in range(rounds):
            before = run.trainer_version
            for _ in range(self.rounds_per_step):
                if run.trainer_version == before:
                    run.round()
            assert run.trainer_version == before + 1, "the step in progress was completed"
        if self.trains_all:
            assert not left & set(run.ledger.groups)
        assert all(0 <= each <= self.staleness for each in run.staleness)


class DiscardingMoves(Moves):
    """The moves with a policy that discards what has become too old."""

    discards, trains_all = True, False
