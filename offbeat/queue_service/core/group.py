"""One group at rest, and what is remembered of one that is gone."""

import msgspec

from offbeat.queue_service.core.records import PutReceipt


class StoredGroup(msgspec.Struct, gc=False):
    """A group and where it stands with each task: a bit a column, a bit a task.

    It refers to nothing that refers back, so the garbage collector need not visit the thousands
    that rest.
    """

    receipt: PutReceipt
    generation: int
    first: int  # columns of the put
    columns: int  # complete: written for all rows
    payload: object
    put_at: float
    more: tuple[tuple[int, int, int, object], ...] = ()  # columns, start, stop, payload
    partial: tuple[tuple[int, int], ...] = ()  # column, rows written
    available: int = 0  # tasks that may claim it
    leased: int = 0  # tasks that have it
    acked: int = 0  # tasks that are done with it


class GroupTombstone(msgspec.Struct, gc=False, array_like=True):
    """Record kept of a group that was cleared or lost."""

    attempt: int
    generation: int
    columns: int  # of its put
    lost: str  # the reason; empty when it was cleared
