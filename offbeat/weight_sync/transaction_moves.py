"""Moves of a replica's transaction: the phases that an event takes it from, and where to. Pure.

``Transaction`` checks its calls by this table, and docs/weight-sync.md shows it.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class TransactionPhase(enum.StrEnum):
    """Phase of a replica's transaction."""

    IDLE = "idle"  # never had weights of this run
    PREPARED = "prepared"
    TRANSFERRING = "transferring"
    VERIFYING = "verifying"  # all chunks arrived, as they were sent
    COMMITTED = "committed"  # serves the new version
    ABORTING = "aborting"
    STALE = "stale"  # a mixture of versions


class TransactionEvent(enum.StrEnum):
    """Calls that move a transaction."""

    BEGIN = "begin"
    CHUNK = "a chunk"
    VERIFY = "verify"
    COMMIT = "commit"
    ABORT = "abort"
    ROLLED_BACK = "rolled back"


class TransactionMove(NamedTuple):
    """A legal move: ``event`` takes a transaction from one of ``leaves`` to ``enters``."""

    event: TransactionEvent
    leaves: frozenset[TransactionPhase]
    enters: TransactionPhase
    when: str = ""  # condition in words, where the event alone is ambiguous


_REST: Final = frozenset(
    {TransactionPhase.IDLE, TransactionPhase.COMMITTED, TransactionPhase.STALE}
)
_OPEN: Final = frozenset(
    {TransactionPhase.PREPARED, TransactionPhase.TRANSFERRING, TransactionPhase.VERIFYING}
)
_VERIFIED: Final = frozenset({TransactionPhase.VERIFYING})
_ABORTING: Final = frozenset({TransactionPhase.ABORTING})
_NEW: Final = "it never had weights of this run"
_KEPT: Final = "its weights are those of a version"
_TORN: Final = "its weights are a mixture"

MOVES: Final = (
    TransactionMove(TransactionEvent.BEGIN, _REST, TransactionPhase.PREPARED),
    TransactionMove(TransactionEvent.CHUNK, _OPEN - _VERIFIED, TransactionPhase.TRANSFERRING),
    TransactionMove(TransactionEvent.VERIFY, _OPEN, TransactionPhase.VERIFYING),
    TransactionMove(TransactionEvent.COMMIT, _VERIFIED, TransactionPhase.COMMITTED),
    TransactionMove(TransactionEvent.ABORT, _OPEN, TransactionPhase.ABORTING),
    TransactionMove(TransactionEvent.ROLLED_BACK, _ABORTING, TransactionPhase.IDLE, _NEW),
    TransactionMove(TransactionEvent.ROLLED_BACK, _ABORTING, TransactionPhase.COMMITTED, _KEPT),
    TransactionMove(TransactionEvent.ROLLED_BACK, _ABORTING, TransactionPhase.STALE, _TORN),
)

LEAVES: Final[Mapping[TransactionEvent, frozenset[TransactionPhase]]] = MappingProxyType({
    move.event: move.leaves for move in MOVES
})  # fmt: skip
"""Phases from which an event takes a transaction."""

PROBLEMS: Final[Mapping[TransactionEvent, str]] = MappingProxyType({
    TransactionEvent.BEGIN: "one is open",
    TransactionEvent.VERIFY: "no transfer is open",
    TransactionEvent.COMMIT: "nothing is verified",
})  # fmt: skip
"""Why an event is illegal in other phases; one that is not named has no effect there."""


def table() -> str:
    """Return the moves as the rows of the table in docs/weight-sync.md."""
    return "".join(
        f"| {', '.join(sorted(move.leaves))} | {move.event} | {move.enters} | {move.when} |\n"
        for move in MOVES
    )
