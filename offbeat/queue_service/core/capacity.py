"""Bounds of the queue: rows and bytes in use, those promised, and producers that wait for room."""

from collections import OrderedDict
from dataclasses import dataclass

from offbeat.queue_service.core.records import CapacityGrant, QueueLimits
from offbeat.queue_service.errors import QueueFull, TooLarge


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """A producer that waits for room, or to which room has been promised."""

    id: int
    room: CapacityGrant
    client: str
    reason: str  # rows | bytes: the limit it exceeded at first


class Capacity:
    """Rows and bytes in use: those of stored groups, and those promised to producers.

    Producers are admitted strictly in order of arrival, so many small puts never starve a big one.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.rows = self.nbytes = 0  # in use, promises included
        self.promised_rows = self.promised_bytes = 0
        self.waiting: OrderedDict[int, CapacityRequest] = OrderedDict()
        self.promised: dict[int, CapacityRequest] = {}

    def take(self, rows: int, nbytes: int) -> None:
        """Add the rows and bytes of a group; negative for a group that is removed."""
        self.rows += rows
        self.nbytes += nbytes

    def lacks(self, rows: int, nbytes: int) -> str | None:
        """Return the limit that this put exceeds: ``rows``, ``bytes``, or None."""
        if self.rows + rows > self.limits.max_rows:
            return "rows"
        return "bytes" if self.nbytes + nbytes > self.limits.max_bytes else None

    def full(self, limit: str, rows: int, nbytes: int) -> QueueFull:
        if limit == "rows":
            return QueueFull(limit, rows, self.rows, self.limits.max_rows)
        return QueueFull(limit, nbytes, self.nbytes, self.limits.max_bytes)

    def check_possible(self, rows: int, nbytes: int) -> None:
        """Raise if waiting cannot help.

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
        """Promise room to waiting producers, in order, until one does not fit."""
        let_in: list[CapacityRequest] = []
        while self.waiting:
            request = next(iter(self.waiting.values()))
            room = request.room
            if self.lacks(room.rows, room.nbytes) is not None:
                break
            del self.waiting[request.id]
            self.promise(request)
            let_in.append(request)
        return let_in

    def promise(self, request: CapacityRequest) -> None:
        self.promised[request.id] = request
        self.promised_rows += request.room.rows
        self.promised_bytes += request.room.nbytes
        self.take(request.room.rows, request.room.nbytes)

    def forget(self, waiter_id: int) -> CapacityRequest | None:
        """End a promise whose put has arrived.

        The caller accounts for the rows and bytes it uses.
        """
        request = self.promised.pop(waiter_id, None)
        if request is not None:
            self.promised_rows -= request.room.rows
            self.promised_bytes -= request.room.nbytes
        return request

    def withdraw(self, waiter_id: int) -> CapacityRequest | None:
        """End a promise whose put will never come."""
        request = self.forget(waiter_id)
        if request is not None:
            self.take(-request.room.rows, -request.room.nbytes)
        return request
