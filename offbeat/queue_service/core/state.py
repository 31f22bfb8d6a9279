"""State shared by the producer and consumer side, and how its changes reach waiters."""

from collections.abc import Iterable

from offbeat.queue_service.core.capacity import Capacity
from offbeat.queue_service.core.group import StoredGroup
from offbeat.queue_service.core.leases import Leases, OpenLease
from offbeat.queue_service.core.partition import Partition
from offbeat.queue_service.core.records import CapacityGrant, Lease, QueueLimits
from offbeat.queue_service.core.tasks import Task
from offbeat.queue_service.core.waits import Waiter
from offbeat.queue_service.errors import UnknownPartition


class State:
    """Partitions, bounds, leases and waits; and the settled and freed items until drained."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.partitions: dict[str, Partition] = {}
        self.bounds = Capacity(limits)
        self.leases = Leases(limits.remembered)
        self.claims: dict[int, Waiter] = {}  # waiting claims by waiter id
        self._generation = 0
        self._last_waiter = 0
        self._settled: list[tuple[int, Lease | CapacityGrant]] = []
        self._freed: list[object] = []

    def _home(self, partition: str) -> Partition:
        home = self.partitions.get(partition)
        if home is None:
            raise UnknownPartition(partition, tuple(self.partitions))
        return home

    def _next_waiter(self) -> int:
        self._last_waiter += 1
        return self._last_waiter

    def _offer(self, home: Partition, group: StoredGroup, now: float) -> None:
        for task in home.tasks.values():
            task.offer(group)
            if task.pools:
                self._serve(home, task, now)

    def _serve(self, home: Partition, task: Task, now: float) -> None:
        while (waiter := task.servable()) is not None:
            groups = task.take(waiter.at_least, waiter.at_most, waiter.where)
            assert groups is not None  # noqa: S101 - that is what servable says
            task.leave(waiter)
            del self.claims[waiter.id]
            lease = self._grant(home, task, groups, waiter.client, now + waiter.lease_s)
            self._settled.append((waiter.id, lease))

    def _grant(
        self, home: Partition, task: Task, groups: list[StoredGroup], client: str, expires_at: float
    ) -> Lease:
        lease = self.leases.open(home, task, groups, client, expires_at)
        receipts = tuple([group.receipt for group in groups])
        return Lease(lease.id, home.name, task.name, receipts, expires_at)

    def _give_back(self, leases: Iterable[OpenLease], now: float) -> None:
        touched: dict[int, OpenLease] = {}
        for lease in leases:
            for group in lease.groups:
                lease.task.give_back(group)
            touched[id(lease.task)] = lease
        for lease in touched.values():
            if lease.task.pools:
                self._serve(lease.partition, lease.task, now)

    def _clear(self, home: Partition, group: StoredGroup, lost: str = "") -> None:
        self._drop(home, group)
        self.bounds.take(-group.receipt.rows, -group.receipt.nbytes)
        home.remember(group, lost)

    def _drop(self, home: Partition, group: StoredGroup) -> None:
        """Remove a group from its partition; the caller updates the bounds."""
        receipt = group.receipt
        del home.groups[receipt.group]
        home.rows -= receipt.rows
        home.nbytes -= receipt.nbytes
        for task in home.tasks.values():
            task.forget(group)
        group.available = group.leased = group.acked = 0
        self._freed.append(group.payload)
        if group.more:
            self._freed.extend(payload for *_, payload in group.more)
        group.payload, group.more = None, ()

    def _let_in(self) -> None:
        for request in self.bounds.let_in():
            self._settled.append((request.id, request.room))

    def cancel(self, waiter_id: int) -> bool:
        """End a wait, or return reserved room. False if the wait is over.

        A claim that has settled is over: its lease is, or was, among ``settled()``.
        """
        waiter = self.claims.pop(waiter_id, None)
        if waiter is not None:
            self.partitions[waiter.partition].tasks[waiter.task].leave(waiter)
            return True
        request = self.bounds.waiting.pop(waiter_id, None)
        if request is None and (request := self.bounds.withdraw(waiter_id)) is not None:
            self._settled = [each for each in self._settled if each[0] != waiter_id]
        if request is not None and self.bounds.waiting:
            self._let_in()
        return request is not None
