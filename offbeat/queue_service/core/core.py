"""The transfer queue without its payloads: groups, leases and waiters, as pure state.

Deterministic: ``now`` is the caller's clock in seconds, payloads are opaque. The effects of a call
are collected for the owner to drain: ``settled()`` after any call that changes something,
``freed()`` for the payloads that nothing refers to any more.

The cost of put, claim, ack, release, clear and expiry does not depend on how much is stored, leased
or waiting (logarithmically where groups come out of order). Only a claim with a predicate inspects
groups one by one.
"""

from collections.abc import Iterable, Sequence

from offbeat.queue_service.core.consuming import Consuming
from offbeat.queue_service.core.producing import Producing
from offbeat.queue_service.core.records import (
    CapacityGrant,
    Lease,
    LostGroup,
    PutReceipt,
    Stats,
)
from offbeat.queue_service.core.snapshot import QueueSnapshot, freeze, thaw
from offbeat.queue_service.core.statistics import stats_of


class QueueCore(Producing, Consuming):
    """State machine of the queue: groups between producers and the tasks that consume them.

    Each task is offered every group once, oldest put first, as soon as all rows have all of the
    task's columns, and again if its lease ends without an ack. A call that raises has changed
    nothing.
    """

    # --- groups leave --------------------------------------------------------------------------

    def clear(self, receipts: Iterable[PutReceipt]) -> int:
        """Remove groups, leased or not; return how many were in the queue.

        A stale receipt clears nothing. Leases continue without the group.
        """
        cleared = 0
        for receipt in receipts:
            home = self._home(receipt.partition)
            group = home.groups.get(receipt.group)
            if group is not None and group.generation == receipt.generation:
                self._clear(home, group)
                cleared += 1
        if self.bounds.waiting:
            self._let_in()
        return cleared

    def clear_partition(self, partition: str) -> int:
        """Remove all groups of a partition; return how many there were.

        Its tasks and waiters stay.
        """
        return self.clear([group.receipt for group in self._home(partition).groups.values()])

    def lost(self, receipts: Iterable[PutReceipt], reason: str) -> list[LostGroup]:
        """Remove these groups, whose payload is lost; ``take_lost`` reports them.

        A stale receipt removes nothing. Only a newer attempt of a lost group is accepted again.
        """
        found: list[LostGroup] = []
        for receipt in receipts:
            home = self._home(receipt.partition)
            group = home.groups.get(receipt.group)
            if group is not None and group.generation == receipt.generation:
                report = LostGroup(
                    receipt.partition,
                    receipt.group,
                    receipt.attempt,
                    receipt.generation,
                    receipt.rows,
                    reason,
                )
                self._clear(home, group, reason or "no reason given")
                home.unreported.append(report)
                home.lost += 1
                found.append(report)
        if self.bounds.waiting:
            self._let_in()
        return found

    def take_lost(self, partition: str) -> list[LostGroup]:
        """Return the groups lost since the last call, in the order they were reported."""
        home = self._home(partition)
        reports, home.unreported = home.unreported, []
        return reports

    # --- clients, and what the owner drains -----------------------------------------------------

    def drop_client(self, client: str, now: float) -> None:
        """End the waits, promises and leases of a client that has died.

        Inspects every lease and waiter once.
        """
        bounds = self.bounds
        waits = [each.id for each in self.claims.values() if each.client == client]
        waits += [each.id for each in bounds.waiting.values() if each.client == client]
        waits += [each.id for each in bounds.promised.values() if each.client == client]
        for waiter_id in waits:
            self.cancel(waiter_id)
        leases = [lease for lease in self.leases.by_id.values() if lease.client == client]
        for lease in leases:
            self.leases.close(lease)
        ended = {lease.id for lease in leases}
        self._settled = [
            (waiter_id, what)
            for waiter_id, what in self._settled
            if not (isinstance(what, Lease) and what.id in ended)
        ]
        self._give_back(leases, now)

    def settled(self) -> list[tuple[int, Lease | CapacityGrant]]:
        """Return the waiters served since the last call, in the order they were served."""
        settled, self._settled = self._settled, []
        return settled

    def freed(self) -> list[object]:
        """Return the payloads released since the last call: nothing here refers to them any more.

        Payloads of puts that were refused or repeated are not among them: they were never stored.
        """
        freed, self._freed = self._freed, []
        return freed

    def stats(self, now: float) -> Stats:
        """Return statistics of stored groups and waiting clients, in constant time."""
        return stats_of(self.partitions.values(), self.bounds, self.claims, self.leases, now)

    # --- snapshots -----------------------------------------------------------------------------

    def export(self, now: float) -> tuple[QueueSnapshot, list[object]]:
        """Return the whole state as data, and the payloads that its parts refer to by position.

        Leases, waits and promises belong to processes and their clock, and are left out: leased
        groups will be delivered again. As JSON a tag of NaN becomes null; msgpack keeps it.
        """
        payloads: list[object] = []
        homes = [freeze(home, now, payloads) for home in self.partitions.values()]
        return QueueSnapshot(
            self._generation, self.leases.last_id, self._last_waiter, homes
        ), payloads

    def import_(self, snapshot: QueueSnapshot, payloads: Sequence[object], now: float) -> None:
        """Restore a snapshot into a queue that has never held a group."""
        if self.partitions:
            raise ValueError("a snapshot is imported into a new queue; this one has partitions")
        for state in snapshot.partitions:
            home = thaw(state, payloads, now, self.limits.remembered)
            self.partitions[home.name] = home
            self.bounds.take(home.rows, home.nbytes)
        self._generation = snapshot.generation
        self.leases.last_id = snapshot.last_lease
        self._last_waiter = snapshot.last_waiter
