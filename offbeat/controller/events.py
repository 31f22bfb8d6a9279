"""The moves of prompt groups, as records: the ledger is their fold, the journal their file."""

import msgspec

from offbeat.messages.groups import Receipt


class Event(msgspec.Struct, frozen=True, tag=True):
    """One mutation of the ledger."""


class Admitted(Event, frozen=True):
    """A prompt was drawn. Its data is a pure function of the ordinal and is not kept here."""

    ordinal: int
    stamp: int  # target step, or NEVER


class Dispatched(Event, frozen=True):
    """Admitted -> in flight."""

    ordinal: int
    attempt: int
    engine: str
    version: int  # the engine's acked version: no token can be older


class Returned(Event, frozen=True):
    """In flight or ready -> admitted: it will be rolled out again."""

    ordinal: int
    attempt: int
    kind: str  # infrastructure | data | evicted
    reason: str


class Committed(Event, frozen=True):
    """In flight -> ready."""

    receipt: Receipt


class Claimed(Event, frozen=True):
    """Ready -> training, in this order."""

    step: int
    attempt: int
    ordinals: tuple[int, ...]


class Unclaimed(Event, frozen=True):
    """An open step was aborted: its groups are ready again."""

    step: int
    attempt: int


class Dropped(Event, frozen=True):
    """A prompt is given up. ``shrinks`` is the step that goes without it, 0 for none."""

    ordinal: int
    reason: str
    shrinks: int


class StepIntent(Event, frozen=True):
    """Durable before finish is sent: these groups may have been trained if we die now."""

    step: int
    attempt: int
    ordinals: tuple[int, ...]


class StepApplied(Event, frozen=True):
    """Binds step, version, trained groups and the frontier of the prompt source."""

    step: int
    version: int
    ordinals: tuple[int, ...]
    frontier: int  # ordinals drawn so far


class StepRefused(Event, frozen=True):
    """The optimizer did not apply the step; its groups are dropped."""

    step: int
    attempt: int
    reason: str


class Released(Event, frozen=True):
    """The trainer published a version; generators that serve it have acked this digest."""

    version: int
    digest: str


AnyEvent = (
    Admitted
    | Dispatched
    | Returned
    | Committed
    | Claimed
    | Unclaimed
    | Dropped
    | StepIntent
    | StepApplied
    | StepRefused
    | Released
)
