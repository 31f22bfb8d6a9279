"""Record of the columns of a group that are written, row by row."""

from dataclasses import dataclass

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core.group import StoredGroup
from offbeat.queue_service.core.partition import Partition


@dataclass(frozen=True, slots=True)
class Written:
    """Progress of a group's columns after a write of rows ``[start, stop)``."""

    start: int
    stop: int
    columns: int  # complete columns, as bits
    partial: tuple[tuple[int, int], ...]  # (column, written rows) of incomplete columns


def written(home: Partition, group: StoredGroup, mask: int, rows: slice | None) -> Written | None:
    """Return the columns after this write; None if all of it is written already.

    Raises:
        SchemaError: The rows are out of range, or the write overlaps an earlier one in part.
    """
    start, stop = _range(rows, group.receipt.rows)
    everything = (1 << group.receipt.rows) - 1
    now = ((1 << stop) - 1) ^ ((1 << start) - 1)
    partial = dict(group.partial)
    before = 0  # columns of which some rows are written already
    missing = 0
    for name in home.names_of(mask):
        bit = home.mask_of_names((name,))
        had = everything if group.columns & bit else partial.get(bit, 0)
        if had & now:
            before |= bit
        if now & ~had:
            missing |= bit
        partial[bit] = had | now
    if not missing:
        return None
    if before:
        raise SchemaError(
            home.names_of(before)[0],
            f"written already in some of rows {start} to {stop - 1}",
            "columns and rows that are not: a payload is never overwritten",
        )
    complete = group.columns
    for bit, had in partial.items():
        if had == everything:
            complete |= bit
    left = tuple((bit, had) for bit, had in partial.items() if not complete & bit)
    return Written(start, stop, complete, left)


def _range(rows: slice | None, count: int) -> tuple[int, int]:
    if rows is None:
        return 0, count
    start, stop = rows.start or 0, count if rows.stop is None else rows.stop
    if rows.step not in {None, 1} or not 0 <= start < stop <= count:
        raise SchemaError("*", f"{rows}", f"a range of rows within 0 to {count}, without a step")
    return start, stop
