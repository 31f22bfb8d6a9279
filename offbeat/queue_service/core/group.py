"""One stored group, and the record kept of one that has left the queue."""

import msgspec

from offbeat.queue_service.core.records import PutReceipt


class StoredGroup(msgspec.Struct, gc=False):
    """A group and its state for each task, as bits: one per column, one per task.

    It has no reference cycles, so the garbage collector need not visit the thousands of stored
    groups.
    """

    receipt: PutReceipt
    generation: int
    first: int  # columns of the first put
    columns: int  # complete columns: written for all rows
    payload: object
    put_at: float
    # (columns, start, stop, payload) of later puts
    more: tuple[tuple[int, int, int, object], ...] = ()
    partial: tuple[tuple[int, int], ...] = ()  # (column, written rows)
    available: int = 0  # tasks that may claim it
    leased: int = 0  # tasks that have it leased
    acked: int = 0  # tasks that have acked it


class GroupTombstone(msgspec.Struct, gc=False, array_like=True):
    """Record kept of a group that was cleared or lost."""

    attempt: int
    generation: int
    columns: int  # columns of its put
    lost: str  # reason of the loss; empty when it was cleared
