"""Waiting claims ordered by size, so that a claim that cannot be served costs nothing."""

import heapq
from dataclasses import dataclass
from typing import Final

from offbeat.queue_service.core.group import StoredGroup
from offbeat.queue_service.core.records import Where

_SLACK: Final = 64


@dataclass(frozen=True, slots=True)
class Waiter:
    """A claim that waits."""

    id: int
    partition: str
    task: str
    client: str
    at_least: int
    at_most: int
    where: Where
    lease_s: float


class WaiterPool:
    """The waiters of one task with the same predicate, and the available groups that match it.

    Waiters without a predicate match every group: the task counts those, they are not listed here.
    """

    def __init__(self) -> None:
        self.matches: dict[int, StoredGroup] = {}  # by generation
        self.waiting: dict[int, Waiter] = {}
        self._asks: list[tuple[int, int]] = []  # heap of (at_least, waiter)

    def join(self, waiter: Waiter) -> None:
        self.waiting[waiter.id] = waiter
        heapq.heappush(self._asks, (waiter.at_least, waiter.id))

    def leave(self, waiter: Waiter) -> None:
        del self.waiting[waiter.id]
        if len(self._asks) > 2 * len(self.waiting) + _SLACK:
            self._asks = [(each.at_least, each.id) for each in self.waiting.values()]
            heapq.heapify(self._asks)

    def servable(self, count: int) -> Waiter | None:
        """Return the request that ``count`` groups satisfy: the smallest, of equal ones the oldest."""
        asks = self._asks
        while asks and asks[0][1] not in self.waiting:
            heapq.heappop(asks)
        return self.waiting[asks[0][1]] if asks and asks[0][0] <= count else None
