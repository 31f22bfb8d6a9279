"""Where every prompt group is. Pure: no I/O, no clock, no asyncio."""

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    Released,
    Returned,
    StepApplied,
    StepIntent,
    StepRefused,
    Unclaimed,
)
from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Receipt, group_id
from offbeat.sampler.policy import NEVER


class Place(enum.StrEnum):
    """The places of a group that is neither trained nor dropped."""

    ADMITTED = "admitted"
    IN_FLIGHT = "in_flight"
    READY = "ready"
    TRAINING = "training"


class IllegalMove(OffbeatError):
    """A group was asked to leave a place where it is not."""

    def __init__(self, move: str, ordinal: int, place: str, attempt: int) -> None:
        super().__init__(move, ordinal, place, attempt)
        self.move, self.ordinal, self.place, self.attempt = move, ordinal, place, attempt

    def __str__(self) -> str:
        return f"cannot {self.move} {group_id(self.ordinal)}: it is {self.place}, attempt {self.attempt}"


@dataclass(slots=True)
class Group:
    """One prompt group between admission and its end."""

    ordinal: int
    stamp: int  # target step, or NEVER
    place: Place = Place.ADMITTED
    attempt: int = 0  # of the last dispatch
    engine: str = ""
    bound_version: int = -1  # no token is older; -1 while admitted
    receipt: Receipt | None = None
    tokens: int = 0  # of the receipt
    failures: Counter[str] = field(default_factory=Counter[str])  # by kind


@dataclass(slots=True)
class Totals:
    """Counts over the whole run."""

    drawn: int = 0
    trained: int = 0
    evicted: int = 0
    retried: Counter[str] = field(default_factory=Counter[str])  # by reason
    dropped: Counter[str] = field(default_factory=Counter[str])  # by reason


def _discard(event: AnyEvent) -> None:
    """The journal of a ledger that needs none."""


class Ledger:
    """Follows each group from admission to its end. It records; the sampler decides.

    Between calls every drawn ordinal is in one place only::

        drawn = admitted + in_flight + ready + training + trained + dropped

    ``trainer_version`` rises by one per applied step and never otherwise. Every mutation is one
    event, handed to ``record`` after it was applied; the state is the fold of the events.
    """

    def __init__(self, record: Callable[[AnyEvent], None] = _discard) -> None:
        self._record = record
        self.groups: dict[int, Group] = {}
        self.ready: dict[int, Group] = {}  # in arrival order
        self.training: dict[int, Group] = {}  # in claim order
        self.totals = Totals()
        self.trainer_version = 0
        self.digest: str | None = None  # of the weights last published
        self.in_flight = 0
        self.admitted = 0
        self.ready_tokens = 0  # prompt and response tokens of the ready groups
        self.versions: dict[int, int] = {}  # in flight or ready, by bound version
        self.stamped: dict[int, int] = {}  # admitted, in flight or ready, by target step
        self.shrunk: dict[int, int] = {}  # by step, from the one in progress on

    @classmethod
    def fold(cls, events: Iterable[AnyEvent]) -> "Ledger":
        """The ledger that these events lead to."""
        ledger = cls()
        for event in events:
            ledger._apply(event)
        return ledger

    def counts(self) -> dict[str, int]:
        """Groups by place; with trained and dropped they sum to drawn."""
        return {
            "drawn": self.totals.drawn,
            "admitted": self.admitted,
            "in_flight": self.in_flight,
            "ready": len(self.ready),
            "training": len(self.training),
            "trained": self.totals.trained,
        }

    def __str__(self) -> str:
        dropped = self.totals.dropped.total()
        return (
            f"{self.admitted} groups admitted, {self.in_flight} in flight, {len(self.ready)} ready, "
            f"{len(self.training)} training, {self.totals.trained} trained, {dropped} dropped"
        )

    def admit(self, stamp: int) -> int:
        """Draw the next prompt; returns its ordinal."""
        ordinal = self.totals.drawn
        self._do(Admitted(ordinal, stamp))
        return ordinal

    def dispatch(self, ordinal: int, engine: str, version: int) -> int:
        """The group goes to an engine that serves ``version``; returns the attempt."""
        group = self._at("dispatch", ordinal, Place.ADMITTED)
        self._do(Dispatched(ordinal, group.attempt + 1, engine, version))
        return group.attempt

    def retry(self, ordinal: int, kind: str, reason: str) -> Group:
        """A rollout failed; the group is admitted again. Its failures are counted by kind."""
        group = self._at("retry", ordinal, Place.IN_FLIGHT)
        self._do(Returned(ordinal, group.attempt, kind, reason))
        return group

    def commit(self, receipt: Receipt) -> None:
        """The group is ready. The caller has checked the receipt."""
        group = self._at("commit", receipt.ordinal, Place.IN_FLIGHT)
        if receipt.attempt != group.attempt:
            raise IllegalMove("commit", receipt.ordinal, group.place, group.attempt)
        self._do(Committed(receipt))

    def evict(self, ordinal: int, reason: str) -> None:
        """A ready group grew too old; its prompt is admitted again."""
        group = self._at("evict", ordinal, Place.READY)
        self._do(Returned(ordinal, group.attempt, "evicted", reason))

    def claim(self, ordinals: Iterable[int], step: int, attempt: int) -> list[Group]:
        """The groups enter the open step, in this order."""
        claimed = [self._at("claim", ordinal, Place.READY) for ordinal in ordinals]
        self._do(Claimed(step, attempt, tuple(group.ordinal for group in claimed)))
        return claimed

    def unclaim(self, step: int, attempt: int) -> None:
        """The open step was aborted: all its groups are ready again."""
        self._do(Unclaimed(step, attempt))

    def drop(self, ordinal: int, reason: str, *, shrink: bool) -> None:
        """Give a prompt up, from wherever it is. With ``shrink`` its step goes without it."""
        group = self._known("drop", ordinal)
        step = group.stamp if group.stamp != NEVER else self.trainer_version + 1
        self._do(Dropped(ordinal, reason, step if shrink else 0))

    def intend(self, step: int, attempt: int) -> None:
        """The groups in training are about to be finished."""
        self._do(StepIntent(step, attempt, tuple(self.training)))

    def applied(self, step: int) -> int:
        """The step over the groups in training was applied; returns the version it made."""
        version = self.trainer_version + 1
        self._do(StepApplied(step, version, tuple(self.training), self.totals.drawn))
        return version

    def refused(self, step: int, attempt: int, reason: str) -> None:
        """The step was not applied; its groups are dropped for ``reason``."""
        self._do(StepRefused(step, attempt, reason))

    def released(self, version: int, digest: str) -> None:
        """The trainer's weights of this version were published."""
        self._do(Released(version, digest))

    def _at(self, move: str, ordinal: int, place: Place) -> Group:
        group = self._known(move, ordinal)
        if group.place is not place:
            raise IllegalMove(move, ordinal, group.place, group.attempt)
        return group

    def _known(self, move: str, ordinal: int) -> Group:
        group = self.groups.get(ordinal)
        if group is None:
            raise IllegalMove(move, ordinal, "trained, dropped or never drawn", 0)
        return group

    def _do(self, event: AnyEvent) -> None:
        self._apply(event)
        self._record(event)

    def _apply(self, event: AnyEvent) -> None:  # noqa: C901, PLR0912 - the table of all moves
        match event:
            case Admitted():
                self.totals.drawn += 1
                self.groups[event.ordinal] = Group(event.ordinal, event.stamp)
                self.admitted += 1
                _add(self.stamped, event.stamp, 1)
            case Dispatched():
                group = self.groups[event.ordinal]
                self._leave(group)
                group.attempt, group.engine = event.attempt, event.engine
                self._enter(group, Place.IN_FLIGHT, event.version)
            case Returned():
                group = self.groups[event.ordinal]
                self._leave(group)
                group.receipt, group.tokens = None, 0
                group.failures[event.kind] += 1
                if event.kind == "evicted":
                    self.totals.evicted += 1
                else:
                    self.totals.retried[event.reason] += 1
                self._enter(group, Place.ADMITTED, -1)
            case Committed():
                group = self.groups[event.receipt.ordinal]
                self._leave(group)
                group.receipt, group.tokens = event.receipt, event.receipt.tokens
                self._enter(group, Place.READY, event.receipt.oldest_version)
            case Claimed():
                for ordinal in event.ordinals:
                    group = self.groups[ordinal]
                    self._leave(group)
                    self._enter(group, Place.TRAINING, group.bound_version)
            case Unclaimed():
                for group in list(self.training.values()):
                    self._leave(group)
                    self._enter(group, Place.READY, group.bound_version)
            case Dropped():
                self._leave(self.groups.pop(event.ordinal))
                self.totals.dropped[event.reason] += 1
                if event.shrinks:
                    _add(self.shrunk, event.shrinks, 1)
            case StepIntent():
                pass
            case StepApplied():
                self._end_step()
                self.totals.trained += len(event.ordinals)
                self.trainer_version = event.version
                self.shrunk = {s: n for s, n in self.shrunk.items() if s > event.step}
            case Released():
                self.digest = event.digest
            case StepRefused():
                self.totals.dropped[event.reason] += self._end_step()

    def _end_step(self) -> int:
        ended = len(self.training)
        for ordinal in self.training:
            del self.groups[ordinal]
        self.training.clear()
        return ended

    def _leave(self, group: Group) -> None:
        """Take a group out of its place's indices."""
        match group.place:
            case Place.ADMITTED:
                self.admitted -= 1
            case Place.IN_FLIGHT:
                self.in_flight -= 1
                _add(self.versions, group.bound_version, -1)
            case Place.READY:
                del self.ready[group.ordinal]
                self.ready_tokens -= group.tokens
                _add(self.versions, group.bound_version, -1)
            case Place.TRAINING:
                del self.training[group.ordinal]
        if group.place is not Place.TRAINING:
            _add(self.stamped, group.stamp, -1)

    def _enter(self, group: Group, place: Place, bound_version: int) -> None:
        group.place, group.bound_version = place, bound_version
        match place:
            case Place.ADMITTED:
                self.admitted += 1
            case Place.IN_FLIGHT:
                self.in_flight += 1
                _add(self.versions, bound_version, 1)
            case Place.READY:
                self.ready[group.ordinal] = group
                self.ready_tokens += group.tokens
                _add(self.versions, bound_version, 1)
            case Place.TRAINING:
                self.training[group.ordinal] = group
        if place is not Place.TRAINING:
            _add(self.stamped, group.stamp, 1)


def _add(counts: dict[int, int], key: int, change: int) -> None:
    """Count, keeping no zeros: the dictionaries stay as small as what they describe."""
    total = counts.get(key, 0) + change
    if total:
        counts[key] = total
    else:
        del counts[key]
