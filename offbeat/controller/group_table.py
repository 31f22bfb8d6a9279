"""Place of every prompt group, computed from the journal's events.

Pure: no I/O, no clock, no asyncio. An event changes only its own groups. So ``GroupTable.apply``
needs constant time per group, however long the run is.

Also defines the records of a group table, as a snapshot of the journal encodes them.
"""

from collections import Counter, OrderedDict
from typing import Final, TypeVar

import msgspec

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Checkpointed,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    DropReason,
    EngineLost,
    Joined,
    Opened,
    Released,
    Retired,
    Returned,
    ReturnKind,
    RewardCallsMade,
    Rewound,
    Served,
    Spent,
    StepApplied,
    StepIntent,
    StepRefused,
    TrainerReplaced,
    Unclaimed,
    UndoneStep,
    WorkerLost,
)
from offbeat.controller.group_moves import Place
from offbeat.messages.groups import Receipt
from offbeat.telemetry.applied_steps import AppliedStepHistory


class GroupRecord(msgspec.Struct, gc=False):
    """State of one prompt group between its admission and its end.

    It is exempt from garbage collection. After a long rewind there are millions of groups, and the
    collector would stop the event loop to traverse them.
    """

    prompt_index: int
    target_step: int | None  # None: any step may train it
    place: Place = Place.ADMITTED
    attempt: int = 0  # of the last dispatch
    engine: str = ""
    oldest_version: int = -1  # no token is older; -1 while admitted
    receipt: Receipt | None = None
    tokens: int = 0  # of the receipt
    arrival: int = 0  # number of earlier commits
    returns: dict[ReturnKind, int] = {}  # msgspec copies it for each instance


class Totals(msgspec.Struct):
    """Counts over the whole run. Groups undone by a rewind do not count as trained."""

    drawn: int = 0
    trained: int = 0
    evicted: int = 0
    failed_prompts: int = 0  # prompts dropped for failures of their data, not by a filter
    arrivals: int = 0
    retried: dict[str, int] = {}  # by reason
    dropped: dict[str, int] = {}  # by reason
    failed_prompts_infrastructure: int = 0  # prompts dropped for failures of the infrastructure
    cancelled: int = 0  # rollouts stopped in flight; they are in ``retried`` or ``dropped``, too
    steps_refused: int = 0  # batches that the trainer did not apply, which made no version


class TableSnapshot(msgspec.Struct, frozen=True):
    """Content of a group table at one moment. Applying the later events gives the later state.

    Its size depends on the outstanding groups, not on the number of steps. The groups of trained
    steps are only in the journal's segments.
    """

    run_id: str
    incarnation: int
    lineage: int
    trainer_version: int
    digest: str | None
    intent: StepIntent | None
    checkpoints: list[int]
    batch_deficits: dict[int, int]
    totals: Totals
    steps: AppliedStepHistory
    groups: list[GroupRecord]  # training, ready, in flight, each in its order; then the others
    checkpoint_digests: dict[int, str] = {}
    rewinding_to: int | None = None
    initial_weights: str = ""


K = TypeVar("K")
MOST_REASONS: Final = 100
"""Maximum number of reasons counted separately, because user code may supply reasons."""
OTHER_REASON: Final = "other"
"""Key under which reasons beyond the limit are counted."""


def count(counts: dict[K, int], key: K, change: int) -> None:
    """Add to a count. Remove zeros, so that the mapping stays as small as the state it counts."""
    total = counts.get(key, 0) + change
    if total:
        counts[key] = total
    else:
        counts.pop(key, None)


def count_reason(counts: dict[str, int], reason: str, groups: int) -> None:
    """Count a reason, keeping a bounded number of them."""
    known = reason in counts or len(counts) < MOST_REASONS
    count(counts, reason if known else OTHER_REASON, groups)


OrderedGroups = OrderedDict[int, GroupRecord]
"""Groups by prompt index, in the order in which they entered.

An OrderedDict, because reading a plain dict from the front skips all its removed entries each time.
"""


class GroupTable:
    """State that results from a journal's events.

    Between two events every drawn prompt index is in exactly one place::

        drawn = admitted + in_flight + ready + training + trained + dropped

    ``trainer_version`` rises by one per applied step and falls in a rewind. Nothing else changes
    it.
    """

    def __init__(self) -> None:
        self.run_id = ""
        self.incarnation = 0
        self.lineage = 0
        self.rewinding_to: int | None = None  # a rewind to this version is recorded in part
        self.groups: dict[int, GroupRecord] = {}
        self.ready: OrderedGroups = OrderedDict()  # in arrival order
        self.training: dict[int, GroupRecord] = {}  # in claim order
        self.totals = Totals()
        self.trainer_version = 0
        self.digest: str | None = None  # digest of the weights published last
        self.intent: StepIntent | None = None  # a step whose outcome is not known
        self.steps = AppliedStepHistory()
        self.checkpoints: list[int] = []  # restorable versions of this lineage
        self.checkpoint_digests: dict[int, str] = {}  # digest of the weights, by version
        self.initial_weights = ""  # digest of version 0; empty until a trainer has reported it
        self.in_flight = 0
        self.admitted = 0
        self.ready_tokens = 0  # prompt and response tokens of the ready groups
        self.outstanding_by_target_step: dict[int | None, int] = {}
        """Number of groups admitted, in flight or ready, by target step."""
        self.batch_deficits: dict[int, int] = {}  # groups missing, by step from the one in progress
        self.ready_at: dict[int, OrderedGroups] = {}  # by oldest version
        self.ready_for: dict[int | None, OrderedGroups] = {}  # by target step
        self.in_flight_at: dict[int, OrderedGroups] = {}  # by oldest version

    @property
    def outstanding(self) -> int:
        """Return the number of groups that are admitted, in flight or ready."""
        return self.admitted + self.in_flight + len(self.ready)

    @property
    def versions(self) -> dict[int, int]:
        """Return the number of groups in flight or ready, by oldest version."""
        held = {version: len(groups) for version, groups in self.ready_at.items()}
        for version, groups in self.in_flight_at.items():
            held[version] = held.get(version, 0) + len(groups)
        return held

    def counts(self) -> dict[str, int]:
        """Return the number of groups by place. With trained and dropped they sum to drawn."""
        return {
            "drawn": self.totals.drawn,
            "admitted": self.admitted,
            "in_flight": self.in_flight,
            "ready": len(self.ready),
            "training": len(self.training),
            "trained": self.totals.trained,
        }

    def __str__(self) -> str:
        dropped = sum(self.totals.dropped.values())
        return (
            f"{self.admitted} groups admitted, {self.in_flight} in flight, {len(self.ready)} ready, "
            f"{len(self.training)} training, {self.totals.trained} trained, {dropped} dropped"
        )

    def snapshot(self) -> TableSnapshot:
        """Return the present state. Later events can be applied to it.

        The snapshot shares objects with this table. Encode it before the table changes again.
        """
        first = {**self.training, **self.ready}
        for dispatched in self.in_flight_at.values():
            first |= dispatched
        rest = [group for prompt_index, group in self.groups.items() if prompt_index not in first]
        return TableSnapshot(
            run_id=self.run_id,
            incarnation=self.incarnation,
            lineage=self.lineage,
            trainer_version=self.trainer_version,
            digest=self.digest,
            intent=self.intent,
            checkpoints=self.checkpoints,
            batch_deficits=self.batch_deficits,
            totals=self.totals,
            steps=self.steps,
            groups=[*first.values(), *rest],
            checkpoint_digests=self.checkpoint_digests,
            rewinding_to=self.rewinding_to,
            initial_weights=self.initial_weights,
        )

    def load(self, snapshot: TableSnapshot) -> None:
        """Load a decoded snapshot into this empty table. The table then owns its parts."""
        self.run_id, self.incarnation = snapshot.run_id, snapshot.incarnation
        self.lineage, self.trainer_version = snapshot.lineage, snapshot.trainer_version
        self.rewinding_to = snapshot.rewinding_to
        self.initial_weights = snapshot.initial_weights
        self.digest, self.intent = snapshot.digest, snapshot.intent
        self.checkpoints, self.batch_deficits = snapshot.checkpoints, snapshot.batch_deficits
        self.checkpoint_digests = snapshot.checkpoint_digests
        self.totals = snapshot.totals
        self.steps = snapshot.steps
        for group in snapshot.groups:
            self._add(group)

    def apply(self, event: AnyEvent) -> None:  # noqa: C901, PLR0912 - the table of all moves
        """Apply one event without checking it: the ledger has done that."""
        match event:
            case Admitted():
                self.totals.drawn += 1
                self._add(GroupRecord(event.prompt_index, event.target_step))
            case Dispatched():
                group = self.groups[event.prompt_index]
                group.attempt, group.engine = event.attempt, event.engine
                self._move(group, Place.IN_FLIGHT, event.version)
            case Returned():
                self._returned(event)
            case Committed():
                group = self.groups[event.receipt.prompt_index]
                group.receipt, group.tokens = event.receipt, event.receipt.tokens
                self._move(group, Place.READY, event.receipt.oldest_version)
            case Claimed():
                for prompt_index in event.prompt_indices:
                    group = self.groups[prompt_index]
                    self._move(group, Place.TRAINING, group.oldest_version)
            case Unclaimed():
                self._unclaim()
            case Dropped():
                self._dropped(event)
            case StepIntent():
                self.intent = msgspec.structs.replace(event, unix_s=0.0)  # the table keeps no times
            case StepApplied():
                self._applied(event)
            case StepRefused():
                self._refused(event.step)
            case Checkpointed():
                self._checkpointed(event.version, event.digest)
            case Rewound():
                self._rewound(event)
            case Released():
                self.digest = event.digest
            case Opened():
                self.run_id, self.incarnation = event.run_id, event.incarnation
            case Joined():
                self.initial_weights = self.initial_weights or event.initial_weights
            case (
                Served()
                | EngineLost()
                | WorkerLost()
                | Retired()
                | TrainerReplaced()
                | Spent()
                | RewardCallsMade()
            ):
                pass  # records about processes and time: no group moves

    # --- moves -----------------------------------------------------------------------------------

    def _returned(self, event: Returned) -> None:
        group = self.groups[event.prompt_index]
        count(group.returns, event.kind, 1)
        if event.kind is ReturnKind.EVICTED:
            self.totals.evicted += 1
        else:
            count_reason(self.totals.retried, event.reason, 1)
            self.totals.cancelled += event.kind is ReturnKind.CANCELLED
        self._readmit(group)

    def _dropped(self, event: Dropped) -> None:
        group = self.groups.pop(event.prompt_index)
        self._leave(group)
        count(self.outstanding_by_target_step, group.target_step, -1)
        is_stale = event.reason is DropReason.STALE
        self.totals.cancelled += is_stale and group.place is Place.IN_FLIGHT
        self.totals.failed_prompts += event.reason is DropReason.DATA
        self.totals.failed_prompts_infrastructure += event.reason is DropReason.INFRASTRUCTURE
        count_reason(self.totals.dropped, event.label, 1)
        if event.shrinks:
            count(self.batch_deficits, event.shrinks, 1)

    def _applied(self, event: StepApplied) -> None:
        self.totals.trained += len(self.training)
        self._end_step()
        self.trainer_version = event.version
        self.batch_deficits.pop(event.step, None)
        self.steps.add(event.reward, event.staleness)

    def _refused(self, step: int) -> None:
        """Drop the batch in training. Every later batch is trained one step earlier.

        The batch is used up although it made no version. The next attempt trains the groups of the
        step after it. If groups were missing from this batch, the later batches are still complete.
        """
        reason = DropReason.STEP_NOT_APPLIED
        count_reason(self.totals.dropped, reason, len(self.training))
        self._end_step()
        self.totals.steps_refused += 1
        self.batch_deficits = {
            at - 1: missing for at, missing in self.batch_deficits.items() if at > step
        }
        for group in self.groups.values():
            if group.target_step is not None and group.target_step > step:
                group.target_step -= 1
        bound_to = Counter(group.target_step for group in self.groups.values())
        self.outstanding_by_target_step = dict(bound_to)
        self.ready_for = {}
        for prompt_index, group in self.ready.items():
            self.ready_for.setdefault(group.target_step, OrderedDict())[prompt_index] = group

    def _checkpointed(self, version: int, digest: str) -> None:
        others = [made for made in self.checkpoints if made != version]
        self.checkpoints = [*others[-1:], version]
        known = {**self.checkpoint_digests, version: digest}
        self.checkpoint_digests = {made: known[made] for made in self.checkpoints if made in known}

    def _rewound(self, event: Rewound) -> None:
        to_version = event.to_version
        self._unclaim()
        for group in list(self.ready.values()):
            if group.receipt is not None and group.receipt.newest_version > to_version:
                self._readmit(group)
        for step in event.undone:
            self._undo(step)
        self.steps.cut(to_version, event.rewards)
        self.trainer_version, self.lineage = to_version, event.lineage
        self.rewinding_to = event.rewinding_to
        self.checkpoints = [version for version in self.checkpoints if version <= to_version]
        known = self.checkpoint_digests
        self.checkpoint_digests = {made: known[made] for made in known if made <= to_version}

    def _undo(self, step: UndoneStep) -> None:
        self.totals.trained -= len(step.prompt_indices)
        self.steps.take_back(step.staleness)
        if step.batch_deficit:
            count(self.batch_deficits, step.version, step.batch_deficit)
        target_step = step.version if step.has_target_step else None
        for prompt_index, attempt in zip(step.prompt_indices, step.attempts, strict=True):
            self._add(GroupRecord(prompt_index, target_step, attempt=attempt))

    def _unclaim(self) -> None:
        """Move the groups in training back to ready. Their receipts are kept if they are known."""
        for group in list(self.training.values()):
            self._move(group, Place.READY, group.oldest_version)
        self.intent = None

    def _end_step(self) -> None:
        """Remove the groups in training, which were trained or dropped."""
        for prompt_index in self.training:
            del self.groups[prompt_index]
        self.training.clear()
        self.intent = None

    def _readmit(self, group: GroupRecord) -> None:
        """Move a group back to admitted, without its receipt."""
        self._move(group, Place.ADMITTED, -1)
        group.receipt, group.tokens = None, 0

    # --- indices ---------------------------------------------------------------------------------

    def _add(self, group: GroupRecord) -> None:
        """Add a group to the table and to the indices of its place."""
        self.groups[group.prompt_index] = group
        count(self.outstanding_by_target_step, group.target_step, 1)
        self._enter(group)

    def _move(self, group: GroupRecord, place: Place, oldest_version: int) -> None:
        """Move a group to another place, behind the groups that are there."""
        self._leave(group)
        group.place, group.oldest_version = place, oldest_version
        if place is Place.READY:
            group.arrival = self.totals.arrivals
            self.totals.arrivals += 1
        self._enter(group)

    def _leave(self, group: GroupRecord) -> None:
        """Remove a group from the indices of its place."""
        match group.place:
            case Place.ADMITTED:
                self.admitted -= 1
            case Place.IN_FLIGHT:
                self.in_flight -= 1
                _take(self.in_flight_at, group.oldest_version, group.prompt_index)
            case Place.READY:
                del self.ready[group.prompt_index]
                self.ready_tokens -= group.tokens
                _take(self.ready_at, group.oldest_version, group.prompt_index)
                _take(self.ready_for, group.target_step, group.prompt_index)
            case Place.TRAINING:
                del self.training[group.prompt_index]
                count(self.outstanding_by_target_step, group.target_step, 1)

    def _enter(self, group: GroupRecord) -> None:
        """Add a group to the indices of its place, behind the groups that are there."""
        match group.place:
            case Place.ADMITTED:
                self.admitted += 1
            case Place.IN_FLIGHT:
                self.in_flight += 1
                self.in_flight_at.setdefault(group.oldest_version, OrderedDict())[
                    group.prompt_index
                ] = group
            case Place.READY:
                self.ready[group.prompt_index] = group
                self.ready_tokens += group.tokens
                self.ready_at.setdefault(group.oldest_version, OrderedDict())[
                    group.prompt_index
                ] = group
                self.ready_for.setdefault(group.target_step, OrderedDict())[group.prompt_index] = (
                    group
                )
            case Place.TRAINING:
                self.training[group.prompt_index] = group
                count(self.outstanding_by_target_step, group.target_step, -1)


def _take(groups_at: dict[K, OrderedGroups], key: K, prompt_index: int) -> None:
    """Remove a group from the index at ``key``. Remove the index if it is then empty."""
    groups = groups_at[key]
    del groups[prompt_index]
    if not groups:
        del groups_at[key]
