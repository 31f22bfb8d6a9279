"""Checks and records every move of a prompt group. Pure: no I/O, clock, asyncio.

Also finds the steps that a rewind undoes, from the journal's events.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Checkpointed,
    Claimed,
    Committed,
    CostEvent,
    Dispatched,
    Dropped,
    DropReason,
    Event,
    Opened,
    Released,
    Returned,
    ReturnKind,
    Rewound,
    Served,
    StepApplied,
    StepIntent,
    StepRefused,
    Unclaimed,
    UndoneStep,
)
from offbeat.controller.group_moves import LEAVES, RETURNS_FROM, GroupEnd, Place
from offbeat.controller.group_table import GroupRecord, GroupTable, TableSnapshot
from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Receipt, group_id
from offbeat.messages.weights import WeightsAck
from offbeat.telemetry.applied_steps import WINDOW_STEPS


class StepsAfter(NamedTuple):
    """Steps after a version, and the rewards up to it."""

    undone: tuple[UndoneStep, ...]  # by version, rising
    rewards: tuple[float, ...]  # of the last steps up to that version, oldest first


def steps_after(version: int, newest_first: Iterable[Event]) -> StepsAfter:
    """Find the steps of the present lineage after ``version``.

    Reads backwards to the step that led to ``version``, and further over the window of rewards
    before that step.

    Args:
        version: Target version of the rewind.
        newest_first: Events of the journal, from the last one backwards.
    """
    undone, rewards = list[UndoneStep](), list[float]()
    standing: int | None = None  # steps of later versions are undone; None: none was seen yet
    for event in newest_first:
        if isinstance(event, Rewound):
            standing = event.to_version if standing is None else min(standing, event.to_version)
        elif isinstance(event, StepApplied) and (standing is None or event.version <= standing):
            standing = event.version - 1
            if event.version > version:
                undone.append(event.undone())
            else:
                rewards.append(event.reward)
        if standing is not None and (
            not standing or (standing < version and len(rewards) == WINDOW_STEPS)
        ):
            break
    return StepsAfter(tuple(reversed(undone)), tuple(reversed(rewards)))


class IllegalMove(OffbeatError):
    """A group was told to leave a place where it is not.

    Fix: report it.
    """

    move: str
    prompt_index: int
    place: str
    attempt: int

    def __str__(self) -> str:
        return f"cannot {self.move} {group_id(self.prompt_index)}: it is {self.place}, attempt {self.attempt}"


class CannotRewind(OffbeatError):
    """The trainer was restored to a version that the journal does not confirm.

    Fix: restore a checkpoint, or start a new run from ``checkpoints/step_N``.
    """

    trainer_version: int
    to_version: int
    in_flight: int

    def __str__(self) -> str:
        if self.in_flight:
            return (
                f"cannot rewind to version {self.to_version}: {self.in_flight} groups are in flight"
            )
        return (
            f"the trainer has no checkpoint between version {self.to_version} and "
            f"{self.trainer_version}, and {self.to_version} is older than the two checkpoints "
            "that the journal guarantees. Repair the newest checkpoint (logs/trainer-rank0.log "
            "names the damaged one), or start a new run from an older one's model"
        )


def _discard(event: AnyEvent) -> None:
    """Discard an event: a ledger that is only computed does not write a journal."""


def _nobody_waits(event: type[AnyEvent]) -> None:
    """Notify nobody: outside a controller no task waits for a change."""


class Ledger(GroupTable):
    """Follows each group from admission to its end. Records moves that the sampler has decided.

    Every change is one event. After it is applied, it is passed to ``record``, so the state can be
    computed from the recorded events. Then ``changed`` is called with the event's type. An illegal
    move raises ``IllegalMove`` and changes nothing.
    """

    def __init__(
        self,
        record: Callable[[AnyEvent], None] = _discard,
        changed: Callable[[type[AnyEvent]], None] = _nobody_waits,
    ) -> None:
        super().__init__()
        self.record, self.changed = record, changed

    @classmethod
    def fold(cls, events: Iterable[AnyEvent], snapshot: TableSnapshot | None = None) -> Self:
        """Return the ledger that results from these events, starting from a snapshot if given."""
        ledger = cls()
        if snapshot is not None:
            ledger.load(snapshot)
        for event in events:
            ledger.apply(event)
        return ledger

    def groups_at(self, place: Place) -> list[int]:
        """Return the prompt indices of the groups at a place, ascending.

        The cost is linear in all groups of the table.
        """
        return sorted(
            prompt_index for prompt_index, group in self.groups.items() if group.place is place
        )

    # --- incarnations of the controller, versions of the trainer ---------------------------------------

    def open(self, run_id: str, incarnation: int, driver: str = "") -> None:
        """Record that this controller continues the run. This is its first event."""
        self._do(Opened(run_id, incarnation, driver))

    def checkpointed(self, version: int, digest: str) -> None:
        """Record that the trainer's state of ``version`` can be restored from now on."""
        self._do(Checkpointed(version, digest))

    def rewind_in_parts(
        self, to_version: int, reason: str, after: StepsAfter, *, groups_per_part: int
    ) -> Iterator[list[int]]:
        """Return to an older version, part by part. Yield the prompt indices to be rolled out again.

        No group may be in flight: the caller has cancelled them.
        After each part the ledger is in the state of a rewind to an intermediate version, so other
        tasks may run. No task may dispatch, claim or apply before the last part: the trainer holds
        ``to_version``. A rewind that the last incarnation left unfinished is continued.

        Args:
            to_version: The version that the trainer holds.
            reason: The reason, as shown to people.
            after: The steps in the journal after that version.
            groups_per_part: Maximum trained groups per part. A part has at least one step, even if
                it is larger.

        Raises:
            CannotRewind: The version is older than the second newest checkpoint, or ``after`` does
                not fit the version.
        """
        made = [step.version for step in after.undone]
        if (
            self.in_flight
            or not min(self.checkpoints, default=0) <= to_version <= self.trainer_version
            or made != list(range(to_version + 1, self.trainer_version + 1))
        ):
            raise CannotRewind(self.trainer_version, to_version, self.in_flight)
        lineage = self.lineage + (self.rewinding_to is None)
        parts = _newest_first(after.undone, groups_per_part)
        for part in parts[:-1]:
            between = part[0].version - 1
            yield self._rewind(
                Rewound(between, lineage, reason, part, rewinding_to=to_version), part
            )
        yield self._rewind(
            Rewound(to_version, lineage, reason, parts[-1], after.rewards), parts[-1]
        )

    def _rewind(self, event: Rewound, undone: Iterable[UndoneStep]) -> list[int]:
        """Record one part of a rewind. Return the prompt indices to be rolled out again."""
        buffered = [*self.training.values(), *self.ready.values()]
        self._do(event)
        again = [group.prompt_index for group in buffered if group.place is Place.ADMITTED]
        return [*again, *(prompt_index for step in undone for prompt_index in step.prompt_indices)]

    # --- prompt groups ---------------------------------------------------------------------------

    def admit(self, target_step: int | None) -> int:
        """Draw the next prompt, for ``target_step`` or (None) for any step. Return its index."""
        prompt_index = self.totals.drawn
        self._do(Admitted(prompt_index, target_step))
        return prompt_index

    def dispatch(self, prompt_index: int, engine: str, version: int) -> int:
        """Send the group to an engine that serves ``version``. Return the number of the attempt."""
        group = self._at("dispatch", prompt_index, LEAVES[Dispatched])
        self._do(Dispatched(prompt_index, group.attempt + 1, engine, version))
        return group.attempt

    def retry(self, prompt_index: int, kind: ReturnKind, reason: str) -> GroupRecord:
        """Readmit a group after a failed or cancelled rollout. Count the return by its kind."""
        group = self._at("retry", prompt_index, RETURNS_FROM[kind] - {Place.READY})
        self._do(Returned(prompt_index, group.attempt, kind, reason))
        return group

    def recover(self, prompt_index: int, reason: str) -> None:
        """Readmit a lost group that a former controller had in flight or ready."""
        group = self._at("recover", prompt_index, RETURNS_FROM[ReturnKind.RECOVERED])
        self._do(Returned(prompt_index, group.attempt, ReturnKind.RECOVERED, reason))

    def commit(self, receipt: Receipt) -> None:
        """Make the group ready. The caller has checked the receipt.

        Raises:
            IllegalMove: The receipt belongs to another attempt, or the group is not in flight.
        """
        group = self._at("commit", receipt.prompt_index, LEAVES[Committed])
        if receipt.attempt != group.attempt:
            raise IllegalMove("commit", receipt.prompt_index, group.place, group.attempt)
        self._do(Committed(receipt))

    def evict(self, prompt_index: int, reason: str) -> None:
        """Readmit a ready group that has grown too old."""
        group = self._at("evict", prompt_index, RETURNS_FROM[ReturnKind.EVICTED])
        self._do(Returned(prompt_index, group.attempt, ReturnKind.EVICTED, reason))

    def refuse(self, prompt_index: int, kind: ReturnKind, reason: str) -> GroupRecord:
        """Readmit a ready group that cannot be trained as it is. Count the return by its kind."""
        group = self._at("refuse", prompt_index, RETURNS_FROM[kind] - {Place.IN_FLIGHT})
        self._do(Returned(prompt_index, group.attempt, kind, reason))
        return group

    def claim(self, prompt_indices: Iterable[int], step: int, attempt: int) -> list[GroupRecord]:
        """Move ready groups into the open step, in this order, and return their records.

        Raises:
            IllegalMove: A group is not ready, or is named twice. Then no group has moved.
        """
        claimed = dict[int, GroupRecord]()
        for prompt_index in prompt_indices:
            group = self._at("claim", prompt_index, LEAVES[Claimed])
            if prompt_index in claimed:
                raise IllegalMove("claim", prompt_index, "claimed already", group.attempt)
            claimed[prompt_index] = group
        self._do(Claimed(step, attempt, tuple(claimed)))
        return list(claimed.values())

    def unclaim(self, step: int, attempt: int) -> None:
        """Make all groups of the open step ready again, because it was aborted."""
        self._do(Unclaimed(step, attempt))

    def drop(
        self, prompt_index: int, reason: DropReason, detail: str = "", *, shrinks: int = 0
    ) -> None:
        """Drop a prompt from any place except training. Step ``shrinks`` gets one group less."""
        self._at("drop", prompt_index, LEAVES[Dropped])
        self._do(Dropped(prompt_index, reason, detail, shrinks))

    def intend(self, step: int, attempt: int) -> None:
        """Record the intent to finish the step that has the groups in training."""
        self._do(StepIntent(step, attempt, tuple(self.training)))

    def applied(self, step: int, attempt: int) -> int:
        """Record that the step that has the groups in training was applied. Return its version."""
        version, trained = self.trainer_version + 1, list(self.training.values())
        receipts = [group.receipt for group in trained if group.receipt is not None]
        rewards = [reward for receipt in receipts for reward in receipt.valid_rewards]
        oldest = [version for receipt in receipts for version in receipt.oldest_versions]
        behind = Counter([self.trainer_version - each for each in oldest])
        self._do(
            StepApplied(
                step,
                attempt,
                version,
                tuple(self.training),
                self.totals.drawn,
                attempts=tuple(group.attempt for group in trained),
                has_target_step=any(group.target_step is not None for group in trained),
                batch_deficit=self.batch_deficits.get(step, 0),
                samples=len(rewards),
                tokens=sum(group.tokens for group in trained),
                reward=statistics.fmean(rewards) if rewards else 0.0,
                staleness=tuple(sorted(behind.items())),
                masked_samples=sum(receipt.masked_samples for receipt in receipts),
            )
        )
        return version

    def refused(self, step: int, attempt: int, reason: str) -> None:
        """Drop the groups in training, because the trainer refused their step for ``reason``."""
        self._do(StepRefused(step, attempt, reason))

    def released(self, version: int, digest: str) -> None:
        """Record that the trainer's weights of this version were published."""
        self._do(Released(version, digest))

    def served(self, ack: WeightsAck) -> None:
        """Record that an engine has verified a release and serves it."""
        self._do(Served(ack.engine, ack.incarnation, ack.epoch, ack.version, ack.digest))

    def note(self, event: CostEvent) -> None:
        """Record a cost of the run. It moves no group."""
        self._do(event)

    def _at(
        self, move: str, prompt_index: int, places: Collection[Place | GroupEnd]
    ) -> GroupRecord:
        group = self.groups.get(prompt_index)
        if group is None:
            raise IllegalMove(move, prompt_index, "trained, dropped or never drawn", 0)
        if group.place not in places:
            raise IllegalMove(move, prompt_index, group.place, group.attempt)
        return group

    def _do(self, event: AnyEvent) -> None:
        self.apply(event)
        self.record(event)
        self.changed(type(event))


def _newest_first(
    steps: Sequence[UndoneStep], groups_per_part: int
) -> list[tuple[UndoneStep, ...]]:
    """Split steps into parts of at most so many groups, last step first. No part is empty."""
    parts, part, groups = list[tuple[UndoneStep, ...]](), list[UndoneStep](), 0
    for step in reversed(steps):
        if part and groups + len(step.prompt_indices) > groups_per_part:
            parts.append(tuple(reversed(part)))
            part, groups = [], 0
        part.append(step)
        groups += len(step.prompt_indices)
    return [*parts, tuple(reversed(part))]
