"""The transfer queue without its payloads: who put what, who may have it, who waits.

Pure and deterministic: ``now`` is the caller's clock in seconds, payloads are opaque. What a call
sets free or wakes is collected, and its owner drains it: ``settled()`` after any call that changes
something, ``freed()`` for the payloads that nothing refers to any more.

Put, claim, ack, release, clear and expiry cost the same however much rests, is leased or waits (the
logarithm of it where groups come out of order). Only a claim with a predicate looks at groups one
by one.
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
    """Groups between producers and the tasks that consume them.

    Each task is offered every group once, oldest put first, as soon as all rows have all of the
    task's columns; again if its lease ends without an ack. A call that raises has changed nothing.
    """

    # --- groups leave --------------------------------------------------------------------------

    def clear(self, receipts: Iterable[PutReceipt]) -> int:
        """Let groups go, leased or not; how many were there.

        A receipt that is stale clears nothing. Leases go on without the group.
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
        """Let all its groups go; how many there were. Its tasks, and who waits there, stay."""
        return self.clear([group.receipt for group in self._home(partition).groups.values()])

    def lost(self, receipts: Iterable[PutReceipt], reason: str) -> list[LostGroup]:
        """Remove these groups, whose payload is lost; ``take_lost`` reports them.

        A receipt that is stale loses nothing. Only a newer attempt of a lost group is taken again.
        """
        found: list[LostGroup] = []
        for receipt in receipts:
            home = self._home(receipt.partition)
            group = home.groups.get(receipt.group)
            if group is not None and group.generation == receipt.generation:
                told = LostGroup(
                    receipt.partition,
                    receipt.group,
                    receipt.attempt,
                    receipt.generation,
                    receipt.rows,
                    reason,
                )
                self._clear(home, group, reason or "no reason given")
                home.untold.append(told)
                home.lost += 1
                found.append(told)
        if self.bounds.waiting:
            self._let_in()
        return found

    def take_lost(self, partition: str) -> list[LostGroup]:
        """The groups lost since this was last asked, in the order they were reported."""
        home = self._home(partition)
        told, home.untold = home.untold, []
        return told

    # --- clients, and what the owner drains -----------------------------------------------------

    def drop_client(self, client: str, now: float) -> None:
        """A client died: end its waits and promises, and give back what it had leased.

        Looks at every lease and waiter once.
        """
        bounds = self.bounds
        waits = [each.id for each in self.claims.values() if each.client == client]
        waits += [each.id for each in bounds.waiting.values() if each.client == client]
        waits += [each.id for each in bounds.promised.values() if each.client == client]
        for waiter_id in waits:
            self.cancel(waiter_id)
        leases = [held for held in self.leases.held.values() if held.client == client]
        for held in leases:
            self.leases.close(held)
        ended = {held.id for held in leases}
        self._settled = [
            (waiter_id, what)
            for waiter_id, what in self._settled
            if not (isinstance(what, Lease) and what.id in ended)
        ]
        self._give_back(leases, now)

    def settled(self) -> list[tuple[int, Lease | CapacityGrant]]:
        """The waiters served since this was last asked, in the order they were served."""
        settled, self._settled = self._settled, []
        return settled

    def freed(self) -> list[object]:
        """The payloads let go of since this was last asked: nothing here refers to them any more.

        Payloads of puts that were refused, or repeated, are not among them: they were never taken.
        """
        freed, self._freed = self._freed, []
        return freed

    def stats(self, now: float) -> Stats:
        """Return statistics of stored groups and waiting clients, in constant time."""
        return stats_of(self.partitions.values(), self.bounds, self.claims, self.leases, now)

    # --- snapshots -----------------------------------------------------------------------------

    def export(self, now: float) -> tuple[QueueSnapshot, list[object]]:
        """The whole state as data, and the payloads its parts refer to by position.

        Leases, waits and promises belong to processes and their clock, and are left out: what was
        leased will be delivered again. As JSON a tag of NaN becomes null; msgpack keeps it.
        """
        payloads: list[object] = []
        homes = [freeze(home, now, payloads) for home in self.partitions.values()]
        return QueueSnapshot(
            self._generation, self.leases.last_id, self._last_waiter, homes
        ), payloads

    def import_(self, snapshot: QueueSnapshot, payloads: Sequence[object], now: float) -> None:
        """Take up a snapshot, in a queue that has held nothing yet."""
        if self.partitions:
            raise ValueError("a snapshot is imported into a new queue; this one has partitions")
        for state in snapshot.partitions:
            home = thaw(state, payloads, now, self.limits.remembered)
            self.partitions[home.name] = home
            self.bounds.take(home.rows, home.nbytes)
        self._generation = snapshot.generation
        self.leases.last_id = snapshot.last_lease
        self._last_waiter = snapshot.last_waiter
