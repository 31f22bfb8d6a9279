"""Legal moves of a prompt group: the places each event moves it from, and the place it moves to.

The ledger's guards, the check of a journal and the diagram in docs/journal.md all use this table.
Pure. The simulator's auditor has a separate table, so that it detects an error in this one.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from offbeat.controller.events import (
    Admitted,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    Event,
    Returned,
    ReturnKind,
    Rewound,
    StepApplied,
    StepRefused,
    Unclaimed,
)


class Place(enum.StrEnum):
    """Places of a group that is neither trained nor dropped."""

    ADMITTED = "admitted"
    IN_FLIGHT = "in_flight"
    READY = "ready"
    TRAINING = "training"


class GroupEnd(enum.StrEnum):
    """Ways in which a group leaves the table. A rewind brings a trained group back."""

    TRAINED = "trained"
    DROPPED = "dropped"


class GroupMove(NamedTuple):
    """A legal move: ``event`` moves a group from one of ``leaves`` to ``enters``."""

    event: type[Event]
    leaves: frozenset[Place | GroupEnd]  # empty: the group is new
    enters: Place | GroupEnd
    when: str = ""  # condition in words, if the event is ambiguous
    kind: ReturnKind | None = None  # kind of a return


def _make_return(kind: ReturnKind, *leaves: Place) -> GroupMove:
    return GroupMove(Returned, frozenset(leaves), Place.ADMITTED, kind.value, kind)


_WAITS: Final = frozenset({Place.ADMITTED})
_OUT: Final = frozenset({Place.IN_FLIGHT})
_READY: Final = frozenset({Place.READY})
_CLAIMED: Final = frozenset({Place.TRAINING})

MOVES: Final = (
    GroupMove(Admitted, frozenset(), Place.ADMITTED),
    GroupMove(Dispatched, _WAITS, Place.IN_FLIGHT),
    GroupMove(Committed, _OUT, Place.READY),
    # From READY: its columns were lost with a machine, or the trainer cannot read them.
    _make_return(ReturnKind.INFRASTRUCTURE, Place.IN_FLIGHT, Place.READY),
    _make_return(ReturnKind.DATA, Place.IN_FLIGHT, Place.READY),
    _make_return(ReturnKind.OUTAGE, Place.IN_FLIGHT),
    _make_return(ReturnKind.CANCELLED, Place.IN_FLIGHT),
    _make_return(ReturnKind.EVICTED, Place.READY),
    _make_return(ReturnKind.RECOVERED, Place.IN_FLIGHT, Place.READY),
    GroupMove(Claimed, _READY, Place.TRAINING),
    GroupMove(Unclaimed, _CLAIMED, Place.READY),
    GroupMove(Dropped, _WAITS | _OUT | _READY, GroupEnd.DROPPED),
    GroupMove(StepApplied, _CLAIMED, GroupEnd.TRAINED),
    GroupMove(StepRefused, _CLAIMED, GroupEnd.DROPPED),
    GroupMove(Rewound, _CLAIMED, Place.READY, "its step was open"),
    GroupMove(Rewound, _CLAIMED | _READY, Place.ADMITTED, "it has tokens of an abandoned version"),
    GroupMove(Rewound, frozenset({GroupEnd.TRAINED}), Place.ADMITTED, "trained since"),
)

LEAVES: Final[Mapping[type[Event], frozenset[Place | GroupEnd]]] = MappingProxyType({
    move.event: frozenset[Place | GroupEnd]().union(
        *(each.leaves for each in MOVES if each.event is move.event)
    )
    for move in MOVES
})  # fmt: skip
"""Places from which an event takes a group."""

RETURNS_FROM: Final[Mapping[ReturnKind, frozenset[Place | GroupEnd]]] = MappingProxyType({
    move.kind: move.leaves for move in MOVES if move.kind is not None
})  # fmt: skip
"""Places from which a group returns to be rolled out again, by kind."""
