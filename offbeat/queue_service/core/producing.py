"""Requests of producers: put a group, add columns to it, wait for room."""

from collections.abc import Sequence

import msgspec

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core.capacity import CapacityRequest
from offbeat.queue_service.core.columns import written
from offbeat.queue_service.core.group import StoredGroup
from offbeat.queue_service.core.partition import Partition
from offbeat.queue_service.core.records import (
    NO_TAGS,
    CapacityGrant,
    ColumnSpec,
    GivenTags,
    PutReceipt,
    Schema,
)
from offbeat.queue_service.core.state import State
from offbeat.queue_service.core.where import checked_tags
from offbeat.queue_service.errors import Redeclared
from offbeat.transfer_queue.errors import StaleHandle


class Producing(State):
    """Producer side of the queue. Puts are all or nothing, and bounded."""

    def declare(self, partition: str, schema: Schema) -> None:
        """Create a partition. Repeating the same declaration changes nothing.

        Raises:
            Redeclared: It is declared with another schema (a SchemaError).
        """
        home = self.partitions.get(partition)
        if home is None:
            self.partitions[partition] = Partition(partition, schema, self.limits.remembered)
        elif home.schema != schema:
            raise Redeclared(f"partition {partition!r}", f"{schema}", f"{home.schema}")

    def put(  # noqa: PLR0913 - a field of the commit each
        self,
        partition: str,
        group: str,
        attempt: int,
        rows: int,
        columns: Sequence[ColumnSpec],
        nbytes: int,
        payload: object,
        *,
        now: float,
        tags: GivenTags = NO_TAGS,
        permit: int | None = None,
    ) -> PutReceipt:
        """Store a group's first columns, for all its rows. On return, the group can be claimed.

        The same (group, attempt, columns) again returns the same receipt, and stores neither the
        payload nor uses any room. A newer attempt replaces an older one, whose leases lose the
        group.

        Args:
            permit: The waiter id of ``wait_to_put`` whose room this uses. Only success consumes it.

        Raises:
            SchemaError: A column, tag or number is invalid.
            StaleHandle: A newer attempt, or other columns of this attempt, were put before.
            QueueFull: There is no room, or earlier producers wait for it.
            TooLarge: There will never be room.
        """
        home = self._home(partition)
        mask = home.mask_of(tuple(columns))
        if rows < 1 or nbytes < 0:
            raise SchemaError("*", f"{rows} rows, {nbytes} bytes", "at least 1 row and 0 bytes")
        own_tags = checked_tags(tags, rows)
        receipt = PutReceipt(
            partition, group, attempt, self._generation + 1, rows, nbytes, own_tags
        )
        old = home.groups.get(group)
        given = _given_before(home, old, receipt, mask)
        if given is not None:
            return self._repeated(given, permit)
        self._check_room(rows, nbytes, old, permit)
        self._use_room(home, receipt, old, permit)
        self._generation = receipt.generation
        new = StoredGroup(receipt, receipt.generation, mask, mask, payload, now)
        home.groups[group] = new
        self._offer(home, new, now)
        if self.bounds.waiting:
            self._let_in()
        return receipt

    def add_columns(
        self,
        receipt: PutReceipt,
        columns: Sequence[ColumnSpec],
        nbytes: int,
        payload: object,
        *,
        now: float,
        rows: slice | None = None,
    ) -> PutReceipt:
        """Add columns to a group, for all its rows or a range.

        Return the receipt with its new size.

        If all of it is written already, nothing changes. It never waits for room: a full queue
        drains only if its groups are completed. The room it uses delays later puts.

        Raises:
            StaleHandle: The group was cleared, or replaced by a newer attempt.
            QueuePayloadLost: It was reported lost.
            SchemaError: A column is not as declared, or partly written already.
        """
        home = self._home(receipt.partition)
        group = home.at(receipt)
        mask = home.mask_of(tuple(columns))
        change = written(home, group, mask, rows)
        if change is None:
            return group.receipt
        if nbytes < 0:
            raise SchemaError("*", f"{nbytes} bytes", "at least 0 bytes")
        start, stop = change.start, change.stop
        group.columns, group.partial = change.columns, change.partial
        group.more = (*group.more, (mask, start, stop, payload))
        group.receipt = msgspec.structs.replace(group.receipt, nbytes=group.receipt.nbytes + nbytes)
        home.nbytes += nbytes
        self.bounds.take(0, nbytes)
        self._offer(home, group, now)
        return group.receipt

    def wait_to_put(self, rows: int, nbytes: int, client: str = "") -> int:
        """Wait for room, behind earlier producers. The waiter id settles with a ``CapacityGrant``.

        From then on the room is reserved: put with the id as ``permit``, or ``cancel`` it. Order is
        strict, so a big put at the head delays smaller ones: give every wait a deadline.

        Raises:
            TooLarge: It can never fit.
        """
        bounds = self.bounds
        bounds.check_possible(rows, nbytes)
        reason = bounds.first_reason() if bounds.waiting else bounds.lacks(rows, nbytes)
        waiter_id = self._next_waiter()
        request = CapacityRequest(waiter_id, CapacityGrant(rows, nbytes), client, reason or "")
        bounds.waiting[waiter_id] = request
        self._let_in()
        return waiter_id

    def _check_room(
        self, rows: int, nbytes: int, old: StoredGroup | None, permit: int | None
    ) -> None:
        bounds = self.bounds
        more_rows, more_bytes = rows, nbytes
        if old is not None:
            more_rows, more_bytes = rows - old.receipt.rows, nbytes - old.receipt.nbytes
        promised = None if permit is None else bounds.promised.get(permit)
        if promised is not None:
            more_rows -= promised.room.rows
            more_bytes -= promised.room.nbytes
            if more_rows <= 0 and more_bytes <= 0:
                return
        lacks = bounds.lacks(more_rows, more_bytes)
        if lacks is None and bounds.waiting and promised is None:
            lacks = bounds.first_reason()
        if lacks is not None:
            bounds.check_possible(rows, nbytes)
            raise bounds.full(lacks, rows, nbytes)

    def _use_room(
        self, home: Partition, receipt: PutReceipt, old: StoredGroup | None, permit: int | None
    ) -> None:
        """Count the room of a group, less its reservation and the group that it replaces."""
        rows, nbytes = receipt.rows, receipt.nbytes
        if permit is not None and (request := self.bounds.forget(permit)) is not None:
            rows -= request.room.rows
            nbytes -= request.room.nbytes
        if old is not None:
            rows -= old.receipt.rows
            nbytes -= old.receipt.nbytes
            self._drop(home, old)
        home.rows += receipt.rows
        home.nbytes += receipt.nbytes
        self.bounds.take(rows, nbytes)

    def _repeated(self, receipt: PutReceipt, permit: int | None) -> PutReceipt:
        if permit is not None:
            self.cancel(permit)
        return receipt


def _given_before(
    home: Partition, old: StoredGroup | None, requested: PutReceipt, mask: int
) -> PutReceipt | None:
    """Return the receipt of an identical earlier put, stored or cleared; None if the put is new.

    Raises:
        StaleHandle: A newer attempt was put, or other columns under this attempt.
    """
    group, attempt = requested.group, requested.attempt
    if old is not None:
        if old.receipt.attempt == attempt and old.first == mask:
            return old.receipt
        if old.receipt.attempt >= attempt:
            raise StaleHandle(group, attempt, old.receipt.attempt)
        return None
    gone = home.gone.get(group)
    if gone is None or gone.attempt < attempt:
        return None
    if gone.attempt > attempt or gone.columns != mask or gone.lost:
        raise StaleHandle(group, attempt, None)
    return msgspec.structs.replace(requested, generation=gone.generation)
