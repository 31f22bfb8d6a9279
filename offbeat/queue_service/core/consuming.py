"""Requests of consumers: lease groups, now or once they are ready, and end leases."""

from collections.abc import Iterable, Sequence
from typing import Any

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core.leases import OpenLease
from offbeat.queue_service.core.records import EVERYTHING, Lease, Part, PutReceipt
from offbeat.queue_service.core.state import State
from offbeat.queue_service.core.waits import Waiter
from offbeat.queue_service.core.where import normal
from offbeat.queue_service.errors import LeaseExpired


class Consuming(State):
    """Consumer side of the queue: claims and leases.

    Each task is offered every group once, and again if its lease ends without an ack.
    """

    def claim(  # noqa: PLR0913 - what is claimed, by whom, for how long
        self,
        partition: str,
        task: str,
        n: int,
        columns: Sequence[str],
        *,
        now: float,
        lease_s: float,
        where: Iterable[Sequence[Any]] = EVERYTHING,
        client: str = "",
        at_least: int | None = None,
    ) -> Lease | None:
        """Lease ``n`` groups (or as many as there are, if those are ``at_least``), else None.

        The first claim of a task fixes which columns it needs.

        Raises:
            Redeclared: An earlier claim of the task needs other columns (a SchemaError).
            SchemaError: A column is not declared, the predicate is invalid, or ``lease_s`` is not
                positive.
        """
        home = self._home(partition)
        least = _checked_count(n, at_least)
        _check_lease(lease_s)
        predicate = normal(where) if where else EVERYTHING
        reader = home.task(task, tuple(columns))
        groups = reader.take(least, n, predicate)
        return None if groups is None else self._grant(home, reader, groups, client, now + lease_s)

    def wait(  # noqa: PLR0913 - as claim
        self,
        partition: str,
        task: str,
        n: int,
        columns: Sequence[str],
        *,
        now: float,
        lease_s: float,
        where: Iterable[Sequence[Any]] = EVERYTHING,
        client: str = "",
        at_least: int | None = None,
    ) -> int:
        """Wait for groups.

        The returned waiter id settles with a ``Lease``, at once if there are enough.

        Among the waiters of one task, any that can be served is: a large request does not delay
        smaller ones, and may be overtaken by them.
        """
        home = self._home(partition)
        least = _checked_count(n, at_least)
        _check_lease(lease_s)
        predicate = normal(where) if where else EVERYTHING
        reader = home.task(task, tuple(columns))
        waiter_id = self._next_waiter()
        waiter = Waiter(waiter_id, partition, task, client, least, n, predicate, lease_s)
        self.claims[waiter_id] = waiter
        reader.join(waiter)
        self._serve(home, reader, now)
        return waiter_id

    def ack(self, lease_id: int) -> None:
        """Mark the groups as consumed: they are not offered to the task again.

        Repeating it changes nothing. A lease holds until ``expire`` has seen its end pass: an ack
        that comes first counts.

        Raises:
            LeaseExpired: The lease had ended before; its groups are, or will be, delivered again.
        """
        lease = self.leases.by_id.get(lease_id)
        if lease is None:
            if self.leases.was_acked(lease_id):
                return
            raise LeaseExpired(lease_id, "ack")
        home, task = lease.partition, lease.task
        self.leases.close(lease)
        self.leases.note_acked(lease_id)
        all_of = home.consumers
        for group in lease.groups:
            if task.done(group) and all_of and group.acked & all_of == all_of:
                self._clear(home, group)
        if self.bounds.waiting:
            self._let_in()

    def release(self, lease_id: int, now: float) -> None:
        """Return the groups to the queue: they are available again, at their old places.

        Raises:
            LeaseExpired: The lease is not open.
        """
        lease = self.leases.get(lease_id, "release")
        self.leases.close(lease)
        self._give_back([lease], now)

    def renew(self, lease_id: int, lease_s: float, now: float) -> Lease:
        """Extend the lease to ``now + lease_s``. Groups that have left the queue are not in it.

        Raises:
            LeaseExpired: The lease is not open.
            SchemaError: ``lease_s`` is not positive.
        """
        lease = self.leases.get(lease_id, "renew")
        _check_lease(lease_s)
        self.leases.renew(lease, now + lease_s)
        return _public_lease(lease)

    def lease(self, lease_id: int) -> Lease:
        """Return the lease with the groups that it still has.

        Raises:
            LeaseExpired: The lease is not open.
        """
        return _public_lease(self.leases.get(lease_id, "look at"))

    def expire(self, now: float) -> list[Lease]:
        """End the leases that have expired; their groups are available again."""
        due = self.leases.due(now)
        ended = [_public_lease(lease) for lease in due]
        self._give_back(due, now)
        return ended

    def next_expiry(self) -> float | None:
        """Return the time of the next lease expiry, unless leases end or are renewed before."""
        return self.leases.next_expiry()

    def parts(self, receipt: PutReceipt, columns: Sequence[str] | None = None) -> tuple[Part, ...]:
        """Return the locations of a group's written columns, all of them by default.

        Raises:
            StaleHandle: The group was cleared or replaced.
            QueuePayloadLost: The group was reported lost.
            SchemaError: A column is not declared.
        """
        home = self._home(receipt.partition)
        wanted = -1 if columns is None else home.mask_of_names(columns)
        return home.parts(home.at(receipt), wanted)


def _checked_count(n: int, at_least: int | None) -> int:
    least = n if at_least is None else at_least
    if not 1 <= least <= n:
        raise SchemaError("n", f"{n} groups, at least {least}", "1 <= at_least <= n")
    return least


def _check_lease(lease_s: float) -> None:
    if not lease_s > 0:  # a NaN in the heap of expiries would hide later ones
        raise SchemaError("lease_s", f"{lease_s}", "seconds, more than 0")


def _public_lease(lease: OpenLease) -> Lease:
    bit = lease.task.bit
    receipts = tuple([group.receipt for group in lease.groups if group.leased & bit])
    return Lease(lease.id, lease.partition.name, lease.task.name, receipts, lease.expires_at)
