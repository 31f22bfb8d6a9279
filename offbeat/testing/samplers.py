"""Proves a staleness policy by random moves of a run: no loop, no clock, no engine.

The run has only a ledger, the versions of engines, and a staleness policy. The ledger records its
events, like a journal in memory.
"""

import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.controller.events import AnyEvent, DropReason, ReturnKind
from offbeat.controller.group_moves import Place
from offbeat.controller.ledger import GroupRecord, Ledger, StepsAfter, steps_after
from offbeat.controller.view import LedgerView
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.failures import FixableError
from offbeat.messages.groups import Receipt
from offbeat.sampler.build import load_custom
from offbeat.sampler.checked_sampler import CheckedSampler, SamplerBroken
from offbeat.sampler.policy import Sampler, earliest_step
from offbeat.testing.algorithms import find_name


class RecordedLedger(Ledger):
    """A ledger that records its events, so that a rewind finds the events to undo."""

    def __init__(self) -> None:
        self.events = list[AnyEvent]()
        super().__init__(self.events.append)

    def rewound(self, to_version: int, reason: str = "rank_lost") -> list[int]:
        after = steps_after(to_version, reversed(self.events))
        return rewind(self, to_version, reason, after)


def rewind(ledger: Ledger, to_version: int, reason: str, after: StepsAfter) -> list[int]:
    """Rewind a ledger in one part. Return the prompt indices to be rolled out again, ascending."""
    parts = ledger.rewind_in_parts(to_version, reason, after, groups_per_part=sys.maxsize)
    return sorted(prompt_index for part in parts for prompt_index in part)


ENGINES = 2


class SamplerBench:
    """A run reduced to the moves that a sampler decides or sees. No model runs.

    Engines load new weights one by one, so ``serving_version`` is the version of the slower engine.
    """

    def __init__(self, sampler: Sampler, groups_per_step: int) -> None:
        self.sampler, self.groups_per_step = sampler, groups_per_step
        is_checked = isinstance(sampler, CheckedSampler)
        self._name = sampler.target if is_checked else type(sampler).__name__
        self.ledger = RecordedLedger()
        self.engines = [0] * ENGINES
        self.view = LedgerView(
            self.ledger,
            serving_version=lambda: self.serving_version,
            groups_needed=lambda: self.groups_needed,
        )
        self.staleness = list[int]()  # staleness of every claimed group [weight versions]

    @property
    def trainer_version(self) -> int:
        return self.ledger.trainer_version

    @property
    def serving_version(self) -> int:
        return min(self.engines)

    @property
    def groups_needed(self) -> int:
        batch_deficits = self.ledger.batch_deficits.get(self.trainer_version + 1, 0)
        return self.groups_per_step - batch_deficits - len(self.ledger.training)

    # --- where groups are ------------------------------------------------------------------------

    def at(self, place: Place) -> list[GroupRecord]:
        return [group for group in self.ledger.groups.values() if group.place is place]

    @property
    def in_flight(self) -> list[GroupRecord]:
        return self.at(Place.IN_FLIGHT)

    def due(self) -> GroupRecord | None:
        """Return the first waiting group if the policy lets it be dispatched now."""
        waiting = sorted(
            (earliest_step(g.target_step), g.prompt_index) for g in self.at(Place.ADMITTED)
        )
        group = self.ledger.groups[waiting[0][1]] if waiting else None
        return group if group and self.sampler.may_dispatch(self.view, group) else None

    # --- moves -----------------------------------------------------------------------------------

    def admit(self, engine: int = 0) -> GroupRecord | None:
        """Draw a prompt and dispatch it, if the policy has room.

        Raises:
            SamplerBroken: The policy admits a group but does not let it be dispatched.
        """
        admission = self.sampler.admit(self.view)
        if admission is None:
            return None
        group = self.ledger.groups[self.ledger.admit(admission.target_step)]
        if not self.sampler.may_dispatch(self.view, group):
            got = f"returned False for group {group.prompt_index}, admitted just now"
            raise SamplerBroken(self._name, "may_dispatch", got, "True")
        self.dispatch(group, engine)
        return group

    def dispatch(self, group: GroupRecord, engine: int = 0) -> None:
        self.ledger.dispatch(group.prompt_index, f"generator-{engine}", self.engines[engine])

    def commit(self, group: GroupRecord, *, begun_late: bool = False) -> None:
        """Finish a group. With ``begun_late``, it waited inside the engine until the last sync."""
        newest = max(group.oldest_version, self.engines[int(group.engine[-1])])
        oldest = newest if begun_late else group.oldest_version
        self.ledger.commit(receipt(group, oldest, newest))

    def claim(self) -> list[GroupRecord]:
        """Claim the groups that the policy selects. The last group of a step trains it."""
        prompt_indices = self.sampler.select(self.view)
        claimed = (
            self.ledger.claim(prompt_indices, self.trainer_version + 1, 1) if prompt_indices else []
        )
        self.staleness += [self.trainer_version - group.oldest_version for group in claimed]
        if self.groups_needed <= 0 and self.ledger.training:
            self.ledger.applied(self.trainer_version + 1, 1)
        return claimed

    def stop(self) -> None:
        """End the step in progress with the groups that it has claimed."""
        self.ledger.applied(self.trainer_version + 1, 1)

    def drop(self, group: GroupRecord, step: int = 0) -> None:
        """Drop a prompt. Train ``step`` without it, or with 0, replace it by a new prompt."""
        self.ledger.drop(group.prompt_index, DropReason.DATA, "reward_raised", shrinks=step)

    def evict(self) -> None:
        for prompt_index in self.sampler.stale(self.view):
            self.ledger.evict(prompt_index, "stale")

    def cancel(self, prompt_indices: list[int]) -> None:
        for prompt_index in prompt_indices:
            self.ledger.retry(prompt_index, ReturnKind.CANCELLED, "stale")

    def serve(self, engine: int) -> None:
        self.engines[engine] = self.trainer_version

    def rewind(self, to_version: int) -> None:
        """Lose the trainer: cancel groups in flight, and restore the engines' old weights."""
        self.cancel([group.prompt_index for group in self.in_flight])
        self.ledger.rewound(to_version)
        self.engines = [to_version] * ENGINES

    def round(self) -> list[GroupRecord]:
        """Make every possible move except failures. Return the claimed groups."""
        for engine in range(ENGINES):
            self.serve(engine)
        self.evict()
        while group := self.due():
            self.dispatch(group)
        room = self.sampler.max_outstanding_groups
        while self.view.outstanding < room and self.admit():
            pass
        for group in self.in_flight:
            self.commit(group)
        return self.claim()


def receipt(group: GroupRecord, oldest: int, newest: int) -> Receipt:
    """Return a receipt of one sample, with first token of ``oldest`` and last of ``newest``."""
    return make_receipt(
        group.prompt_index,
        group.attempt,
        (((oldest, 1), (newest, 1)),),
        engine=group.engine,
        rewards=(1.0,),
    )


def find_step(group: GroupRecord, run: SamplerBench, max_staleness: int) -> int:
    """Return the step that can omit a waiting group so that every other group keeps its place."""
    if group.target_step is not None:
        return max(group.target_step, run.trainer_version + 1)
    return max(run.trainer_version, run.serving_version + max_staleness) + 1


MOVES: Final = 200
"""Number of moves of one run before failures end."""

FAILURES: Final = 0.1
"""Share of moves that are failures, and share of failures in which the trainer is lost."""

STEPS_AFTER: Final = 12
"""Steps that must follow without failures."""

ROUNDS: Final = 8
"""Rounds in which a step must become full. Each round makes every possible move."""


class SamplerRefused(FixableError):
    """With this policy a run would stall, or exceed the policy's own limit.

    Fix: correct the sampler as the message says.
    """

    form = "{}: {}. {}"


def prove_sampler(
    sampler: Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    *,
    groups_per_step: int = 3,
    max_staleness: int = 2,
    runs: int = 200,
) -> None:
    """Prove that runs with a policy stay within the bound and never stall.

    Groups are dispatched, finished, lost, retried and evicted in random order. Engines load new
    weights one by one, and the trainer is lost and restored. Each answer of the policy is checked
    as in a run. Then failures end, and every step must become full.

    Args:
        sampler: The object that ``sampler.target`` would name.
        options: As in ``sampler.options``.
        groups_per_step: Groups per step of the runs.
        max_staleness: Staleness bound of the runs [weight versions].
        runs: Number of random runs; run N has seed N.

    Raises:
        SamplerNotLoaded: The policy cannot be created.
        SamplerBroken: A run cannot follow an answer of the policy.
        SamplerRefused: A run stalls, or has more groups than ``max_outstanding_groups``.
    """
    target = find_name(sampler)
    config = CustomSamplerConfig(
        target=target, max_staleness=max_staleness, options=dict(options or {})
    )
    for seed in range(runs):
        policy = load_custom(config, groups_per_step, Path.cwd())
        run = _Run(SamplerBench(policy, groups_per_step), random.Random(seed))
        for _ in range(MOVES):
            run.move()
            if run.outstanding > policy.max_outstanding_groups and not run.was_rewound:
                problem = (
                    f"run {seed}: {run.outstanding} groups are admitted and not trained, its "
                    f"max_outstanding_groups is {policy.max_outstanding_groups}"
                )
                raise SamplerRefused(target, problem, "Let admit return None when they are reached")
        for step in range(STEPS_AFTER):
            if not run.completes_a_step():
                raise SamplerRefused(target, f"run {seed}: {run.describe_stall(step)}", _STALL_FIX)


_STALL_FIX: Final = "Let admit draw a group when the step lacks one, and select return ready groups within the bound"


class _Run:
    """A run that moves at random."""

    def __init__(self, bench: SamplerBench, draw: random.Random) -> None:
        self._bench, self._draw = bench, draw
        self.was_rewound = False  # after a rewind, groups return that the policy admitted long ago

    @property
    def outstanding(self) -> int:
        return self._bench.view.outstanding + len(self._bench.ledger.training)

    def move(self) -> None:
        """Make one possible move."""
        bench, draw = self._bench, self._draw
        moves = [self._admit, self._dispatch, self._serve, self._sweep, bench.claim]
        if bench.in_flight:
            moves += [self._commit, self._commit]
        if draw.random() < FAILURES:
            moves = [self._retry] if bench.in_flight else moves
            moves = [self._abort] if bench.ledger.training else moves
            moves = [self._rewind] if bench.trainer_version and draw.random() < FAILURES else moves
        draw.choice(moves)()

    def completes_a_step(self) -> bool:
        """Make every possible move, for some rounds. Return whether a step was trained."""
        before = self._bench.trainer_version
        for _ in range(ROUNDS):
            self._bench.round()
            if self._bench.trainer_version > before:
                return True
        return False

    def describe_stall(self, step: int) -> str:
        """Return a sentence on the groups that a step lacks."""
        view = self._bench.view
        return (
            f"step {self._bench.trainer_version + 1} is never full, {step} steps after the last "
            f"failure: it needs {view.groups_needed} groups, {len(view.ready)} are ready, {view.waiting} wait"
        )

    def _admit(self) -> None:
        for _ in range(self._draw.randint(1, 4)):
            self._bench.admit(self._draw.randrange(ENGINES))

    def _dispatch(self) -> None:
        if group := self._bench.due():
            self._bench.dispatch(group, self._draw.randrange(ENGINES))

    def _serve(self) -> None:
        self._bench.serve(self._draw.randrange(ENGINES))

    def _sweep(self) -> None:
        self._bench.evict()
        late = self._bench.sampler.in_flight_to_cancel(self._bench.view, predictive=True)
        self._bench.cancel(late)

    def _commit(self) -> None:
        group = self._draw.choice(self._bench.in_flight)
        self._bench.commit(group, begun_late=self._draw.random() < 0.5)  # noqa: PLR2004 -- a coin

    def _retry(self) -> None:
        group = self._draw.choice(self._bench.in_flight)
        self._bench.ledger.retry(group.prompt_index, ReturnKind.INFRASTRUCTURE, "engine_lost")

    def _abort(self) -> None:
        self._bench.ledger.unclaim(self._bench.trainer_version + 1, 1)

    def _rewind(self) -> None:
        self.was_rewound = True
        self._bench.rewind(max(0, self._bench.trainer_version - self._draw.randint(1, 3)))
