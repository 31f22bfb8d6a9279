"""The bounds of the queue: what is taken, what is promised, and which producers wait for room."""

from collections import OrderedDict
from dataclasses import dataclass

from offbeat.queue_service.core.records import CapacityGrant, QueueLimits
from offbeat.queue_service.errors import QueueFull, TooLarge


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """A producer that waits for room, or has been promised it."""

    id: int
    room: CapacityGrant
    client: str
    reason: str  # rows | bytes: what was short when it came


class Capacity:
    """Rows and bytes taken: those of groups that rest, and those promised to producers.

    Producers are let in strictly in the order they came, so many small puts never starve a big one.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.rows = self.nbytes = 0  # taken, promises included
        self.promised_rows = self.promised_bytes = 0
        self.waiting: OrderedDict[int, CapacityRequest] = OrderedDict()
        self.promised: dict[int, CapacityRequest] = {}

    def take(self, rows: int, nbytes: int) -> None:
        """Count what is put, or what is let go of when negative."""
        self.rows += rows
        self.nbytes += nbytes

    def lacks(self, rows: int, nbytes: int) -> str | None:
        """Return the limit that this put exceeds: ``rows``, ``bytes``, or none."""
        if self.rows + rows > self.limits.max_rows:
            return "rows"
        return "bytes" if self.nbytes + nbytes > self.limits.max_bytes else None

    def full(self, limit: str, rows: int, nbytes: int) -> QueueFull:
        if limit == "rows":
            return QueueFull(limit, rows, self.rows, self.limits.max_rows)
        return QueueFull(limit, nbytes, self.nbytes, self.limits.max_bytes)

    def check_possible(self, rows: int, nbytes: int) -> None:
        """Raise what no waiting can repair.

        Raises:
            TooLarge: It would not fit into an empty queue.
        """
        if rows > self.limits.max_rows:
            raise TooLarge("rows", rows, self.rows, self.limits.max_rows)
        if nbytes > self.limits.max_bytes:
            raise TooLarge("bytes", nbytes, self.nbytes, self.limits.max_bytes)

    def first_reason(self) -> str:
        """Return the limit that the first waiting producer exceeds."""
        return next(iter(self.waiting.values())).reason

    def let_in(self) -> list[CapacityRequest]:
        """Promise room to those who wait, in order, until one does not fit."""
        let_in: list[CapacityRequest] = []
        while self.waiting:
            asking = next(iter(self.waiting.values()))
            room = asking.room
            if self.lacks(room.rows, room.nbytes) is not None:
                break
            del self.waiting[asking.id]
            self.promise(asking)
            let_in.append(asking)
        return let_in

    def promise(self, asking: CapacityRequest) -> None:
        self.promised[asking.id] = asking
        self.promised_rows += asking.room.rows
        self.promised_bytes += asking.room.nbytes
        self.take(asking.room.rows, asking.room.nbytes)

    def forget(self, waiter_id: int) -> CapacityRequest | None:
        """End a promise whose put is here; what is taken is for the caller to set right."""
        asking = self.promised.pop(waiter_id, None)
        if asking is not None:
            self.promised_rows -= asking.room.rows
            self.promised_bytes -= asking.room.nbytes
        return asking

    def withdraw(self, waiter_id: int) -> CapacityRequest | None:
        """End a promise whose put will never come."""
        asking = self.forget(waiter_id)
        if asking is not None:
            self.take(-asking.room.rows, -asking.room.nbytes)
        return asking
