"""Leases of groups: holder and expiry."""

import heapq
from collections import OrderedDict
from typing import Final

import msgspec

from offbeat.queue_service.core.group import StoredGroup
from offbeat.queue_service.core.partition import Partition
from offbeat.queue_service.core.tasks import Task
from offbeat.queue_service.errors import LeaseExpired

_SLACK: Final = 64


class OpenLease(msgspec.Struct, gc=False):
    """A lease that runs. Groups that have left the queue meanwhile are told by their bits."""

    id: int
    partition: Partition
    task: Task
    groups: list[StoredGroup]
    client: str
    expires_at: float


class Leases:
    """The leases that run, the soonest to end first."""

    def __init__(self, remembered: int) -> None:
        self.held: dict[int, OpenLease] = {}
        self.last_id = 0
        self._remembered = remembered
        self._acked: OrderedDict[int, None] = OrderedDict()
        self._ends: list[tuple[float, int]] = []  # heap; a renewed lease has several entries

    def open(
        self,
        partition: Partition,
        task: Task,
        groups: list[StoredGroup],
        client: str,
        expires_at: float,
    ) -> OpenLease:
        self.last_id += 1
        held = OpenLease(self.last_id, partition, task, groups, client, expires_at)
        self.held[held.id] = held
        heapq.heappush(self._ends, (expires_at, held.id))
        return held

    def get(self, lease_id: int, during: str) -> OpenLease:
        """The lease.

        Raises:
            LeaseExpired: It does not run.
        """
        held = self.held.get(lease_id)
        if held is None:
            raise LeaseExpired(lease_id, during)
        return held

    def renew(self, held: OpenLease, expires_at: float) -> None:
        held.expires_at = expires_at
        heapq.heappush(self._ends, (expires_at, held.id))
        self._sweep()

    def close(self, held: OpenLease) -> None:
        del self.held[held.id]
        self._sweep()

    def note_acked(self, lease_id: int) -> None:
        """An ack that is repeated, because its answer was lost, is to change nothing."""
        self._acked[lease_id] = None
        if len(self._acked) > self._remembered:
            self._acked.popitem(last=False)

    def was_acked(self, lease_id: int) -> bool:
        return lease_id in self._acked

    def due(self, now: float) -> list[OpenLease]:
        """The leases whose time is over, the longest over first; they are closed."""
        over: list[OpenLease] = []
        while (ends := self.next_expiry()) is not None and ends <= now:
            over.append(self.held.pop(heapq.heappop(self._ends)[1]))
        return over

    def next_expiry(self) -> float | None:
        """Return the time at which the next lease ends, unless it is renewed."""
        ends, held = self._ends, self.held
        while ends:
            at, lease_id = ends[0]
            lease = held.get(lease_id)
            if lease is not None and lease.expires_at == at:
                return at
            heapq.heappop(ends)
        return None

    def _sweep(self) -> None:
        if len(self._ends) > 2 * len(self.held) + _SLACK:
            self._ends = [(held.expires_at, held.id) for held in self.held.values()]
            heapq.heapify(self._ends)
