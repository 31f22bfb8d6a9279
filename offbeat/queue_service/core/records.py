"""Public records of the queue, which both msgspec and pickle can encode."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from offbeat.messages.failures import SchemaError

Scalar = int | float | str | bool | None
Tags = dict[str, tuple[Scalar, ...]]
"""Small scalars of a group by name, one per row: ``{"reward": (1.0, 0.0), ...}``."""

GivenTags = Mapping[str, Sequence[Scalar]]
"""Tags as a producer passes them."""

NO_TAGS: Final[GivenTags] = {}

Where = tuple[tuple[str, str, Any], ...]
"""Clauses ``(tag, operator, value)``; see ``offbeat.queue_service.core.where``."""

EVERYTHING: Final[Where] = ()


class ColumnSpec(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """One column: its name, type and layout, as a schema declares it and a producer writes it."""

    name: str
    dtype: str  # numpy's name; "object" for values that are no tensor
    ragged: bool = False  # whether rows differ in length


class Schema(msgspec.Struct, frozen=True):
    """The columns of a partition. No two share a name.

    ``consumers`` are the tasks that each read every group: once all of them have acked a group, it
    is cleared. Without any, a group stays until it is cleared by a call.
    """

    columns: tuple[ColumnSpec, ...]
    consumers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        for name in names:
            if names.count(name) > 1:
                raise SchemaError(name, "declared twice", "one declaration a column")


class QueueLimits(msgspec.Struct, frozen=True):
    """Capacity of a queue: a producer waits as long as its put does not fit."""

    max_rows: int
    max_bytes: int
    # Cleared groups and ended leases that are remembered, to recognise late calls
    remembered: int = 65_536

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.max_bytes < 1 or self.remembered < 0:
            raise ValueError(
                f"{self}: max_rows and max_bytes are at least 1, remembered at least 0"
            )


class PutReceipt(msgspec.Struct, frozen=True, gc=False):
    """A stored group: proof for its producer, handle for its consumers.

    A queue never issues a ``generation`` twice, so a receipt never means another group.
    """

    partition: str
    group: str
    attempt: int
    generation: int
    rows: int
    nbytes: int
    tags: Tags


class Lease(msgspec.Struct, frozen=True, gc=False):
    """Groups leased to one consumer, oldest put first, until acked or past ``expires_at``."""

    id: int
    partition: str
    task: str
    receipts: tuple[PutReceipt, ...]
    expires_at: float  # seconds, on the clock of the queue's owner


class CapacityGrant(msgspec.Struct, frozen=True, gc=False):
    """Rows and bytes reserved for one put of the producer that waited for them."""

    rows: int
    nbytes: int


class Part(msgspec.Struct, frozen=True, gc=False):
    """One payload of a group: its columns, for the rows ``[start, stop)``."""

    columns: tuple[str, ...]
    start: int
    stop: int
    payload: Any


class LostGroup(msgspec.Struct, frozen=True, gc=False):
    """A group whose payload is lost: its rows have to be made again, as a newer attempt."""

    partition: str
    group: str
    attempt: int
    generation: int
    rows: int
    reason: str


class TaskStats(msgspec.Struct, frozen=True):
    """Groups of a partition by their state for one task; groups in none of these lack columns."""

    columns: tuple[str, ...]
    available: int
    leased: int
    acked: int
    waiting: int  # number of waiting claims


class PartitionStats(msgspec.Struct, frozen=True):
    """Statistics of one partition."""

    groups: int
    rows: int
    nbytes: int
    oldest_age_s: float  # 0 when empty
    lost: int  # groups lost since the start
    tasks: dict[str, TaskStats]


class Stats(msgspec.Struct, frozen=True):
    """Statistics of the queue: stored groups and waiting clients.

    ``waits`` counts waiters by reason. Producers: ``rows``, ``bytes``. Consumers: ``groups`` (too
    few were put), ``columns`` (enough are stored, but some columns are not written), ``where`` (too
    few match).
    """

    groups: int
    rows: int
    nbytes: int
    promised_rows: int  # reserved for producers that have waited and not put yet
    promised_bytes: int
    oldest_age_s: float
    leases: int
    lost: int
    waits: dict[str, int]
    partitions: dict[str, PartitionStats]
