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
    """An open lease. Groups that have left the queue meanwhile are recognised by their bits."""

    id: int
    partition: Partition
    task: Task
    groups: list[StoredGroup]
    client: str
    expires_at: float


class Leases:
    """The open leases, ordered by expiry."""

    def __init__(self, remembered: int) -> None:
        self.by_id: dict[int, OpenLease] = {}
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
        lease = OpenLease(self.last_id, partition, task, groups, client, expires_at)
        self.by_id[lease.id] = lease
        heapq.heappush(self._ends, (expires_at, lease.id))
        return lease

    def get(self, lease_id: int, during: str) -> OpenLease:
        """Return the open lease.

        Raises:
            LeaseExpired: The lease is not open.
        """
        lease = self.by_id.get(lease_id)
        if lease is None:
            raise LeaseExpired(lease_id, during)
        return lease

    def renew(self, lease: OpenLease, expires_at: float) -> None:
        lease.expires_at = expires_at
        heapq.heappush(self._ends, (expires_at, lease.id))
        self._sweep()

    def close(self, lease: OpenLease) -> None:
        del self.by_id[lease.id]
        self._sweep()

    def note_acked(self, lease_id: int) -> None:
        """Remember an ack, so that repeating it after a lost reply changes nothing."""
        self._acked[lease_id] = None
        if len(self._acked) > self._remembered:
            self._acked.popitem(last=False)

    def was_acked(self, lease_id: int) -> bool:
        return lease_id in self._acked

    def due(self, now: float) -> list[OpenLease]:
        """Close and return the expired leases, the earliest expiry first."""
        over: list[OpenLease] = []
        while (ends := self.next_expiry()) is not None and ends <= now:
            over.append(self.by_id.pop(heapq.heappop(self._ends)[1]))
        return over

    def next_expiry(self) -> float | None:
        """Return the time at which the next lease ends, unless it is renewed."""
        ends, by_id = self._ends, self.by_id
        while ends:
            at, lease_id = ends[0]
            lease = by_id.get(lease_id)
            if lease is not None and lease.expires_at == at:
                return at
            heapq.heappop(ends)
        return None

    def _sweep(self) -> None:
        if len(self._ends) > 2 * len(self.by_id) + _SLACK:
            self._ends = [(lease.expires_at, lease.id) for lease in self.by_id.values()]
            heapq.heapify(self._ends)
