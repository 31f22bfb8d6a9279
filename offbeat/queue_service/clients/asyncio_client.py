"""Client of the queue service for one event loop."""

from collections.abc import Iterable, Sequence
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from offbeat.queue_service import wire
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.clients.links import LoopCarrier, LoopLink, anchor
from offbeat.queue_service.clients.protocol import (
    ClientProtocol,
    Declared,
    Exchange,
    single_request,
)
from offbeat.queue_service.clients.times import ANSWER_S, LEASE_S, ROOM_S, SNAPSHOT_S
from offbeat.queue_service.core import records
from offbeat.queue_service.core.records import (
    EVERYTHING,
    NO_TAGS,
    GivenTags,
    LostGroup,
    PutReceipt,
    Where,
)
from offbeat.queue_service.wire import ServiceStats
from offbeat.transfer_queue import codec
from offbeat.transfer_queue.codec import Column, Columns

if TYPE_CHECKING:
    from offbeat.transfer_queue.tensordict_codec import TensorDict

T = TypeVar("T")


class TransferQueueClient:
    """Asyncio client: puts, claims and reads groups. Any number of calls may run concurrently.

    Every call has a deadline; a service that dies raises ``ActorLost``, one that hangs
    ``DeadlineExceeded``. Cancelling a waiting call withdraws it.
    """

    def __init__(self, link: LoopCarrier, protocol: ClientProtocol) -> None:
        """Create a client from the objects that carry its calls; use ``connect`` instead."""
        self.link = link
        self._protocol = protocol

    @property
    def maps(self) -> bool:
        """Return whether memory is shared with the service, so that reading copies nothing."""
        return self._protocol.maps

    @classmethod
    async def connect(
        cls, path: str, queue: str = "queue", answer_s: float = ANSWER_S, *, maps: bool = True
    ) -> Self:
        """Return a client of the service that listens on a Unix socket.

        Args:
            path: Path of the socket.
            queue: Name of the service in errors.
            answer_s: Seconds to wait for any reply, beyond those that a call may wait itself.
            maps: Share memory with the service where that works; else payloads go through the
                socket.

        Raises:
            ActorLost: No service listens there.
        """
        protocol = ClientProtocol()
        link = await LoopLink.connect(path, queue, answer_s, protocol.freed, maps=maps)
        protocol.maps = link.maps
        protocol.anchored(anchor(path, queue, link.client))
        return cls(link, protocol)

    @classmethod
    def over(cls, link: LoopCarrier) -> Self:
        """Return a client on another node than the service. Payloads travel inside its calls."""
        return cls(link, ClientProtocol())

    async def declare(
        self, partition: str, columns: Iterable[Declared], consumers: Sequence[str] = ()
    ) -> None:
        """Create a partition. Repeating the same declaration changes nothing.

        Args:
            partition: Name of the partition.
            columns: Columns that groups may have: ``ColumnSpec``, ``(name, dtype)`` or ``(name,
                dtype, ragged)``.
            consumers: Tasks that each read every group: a group that all of them acked is cleared.

        Raises:
            SchemaError: The partition exists with another declaration.
        """
        await self._run(self._protocol.declare(partition, columns, consumers))

    async def put(
        self,
        partition: str,
        group: str,
        columns: Columns,
        tags: GivenTags = NO_TAGS,
        *,
        attempt: int = 0,
        deadline_s: float = ROOM_S,
    ) -> PutReceipt:
        """Put a group, all or nothing. On return it can be claimed, and survives this process.

        Putting it again with the same attempt and columns changes nothing; a newer attempt replaces
        an older one. The columns are copied, so the caller may reuse them.

        Args:
            partition: Name of a declared partition.
            group: Name of the group; a partition holds one group of a name at a time.
            columns: Name to dense array [rows, ...], ``Ragged`` or list, all with the same number
                of rows.
            tags: Small values, one per row, which travel with the receipt and which claims select
                by.
            attempt: Number of the attempt that made the group.
            deadline_s: Seconds to wait for room, behind earlier producers.

        Raises:
            QueueFull: There was no room in time; names the limit. ``TooLarge``: there never will
                be.
            StaleHandle: A newer attempt, or other columns of this attempt, were put before.
            SchemaError: A column is not as declared.
            UnknownPartition: The partition is not declared.
        """
        exchange = self._protocol.put(partition, group, columns, tags, attempt, deadline_s)
        return await self._run(exchange)

    async def add_columns(
        self, receipt: PutReceipt, columns: Columns, rows: slice | None = None
    ) -> PutReceipt:
        """Write further columns of a group, or of some of its rows. Repeating it changes nothing.

        It never waits for room: a full queue drains only if its groups are completed.

        Raises:
            StaleHandle: The group has left the queue, or was replaced by a newer attempt.
            SchemaError: A column is not as declared, has other rows, or is partly written already.
        """
        return await self._run(self._protocol.add_columns(receipt, columns, rows))

    async def claim(
        self,
        partition: str,
        task: str,
        n: int = 1,
        columns: Sequence[str] = (),
        *,
        where: Where = EVERYTHING,
        at_least: int | None = None,
        deadline_s: float = 0.0,
        lease_s: float = LEASE_S,
    ) -> ClientLease | None:
        """Lease the next groups of a task, oldest first.

        A group is leased to one consumer at a time.

        The service waits, so the put that completes the groups triggers the reply.

        Args:
            partition: Name of a declared partition.
            task: Name of the task; every task is offered every group.
            n: Maximum number of groups.
            columns: Columns that have to be written; the same in every claim of a task.
            where: ``(tag, operator, value)`` clauses that hold for all rows of a group.
            at_least: Minimum number of groups; ``n`` by default.
            deadline_s: Seconds to wait for them; 0 returns what is available.
            lease_s: Seconds until the groups are offered to others, unless renewed, acked or
                released.

        Returns:
            None if there were too few groups in time.
        """
        exchange = self._protocol.claim(
            partition, task, n, at_least, columns, where, lease_s, deadline_s
        )
        return await self._run(exchange)

    async def get(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> dict[str, Column]:
        """Return the rows of the groups, in order.

        Columns of one group are views, of several a copy.

        Views are read-only, and stay valid as long as they live, whatever happens to the group.

        Raises:
            QueuePayloadLost: A payload cannot be read; the group has left the queue, reported lost.
            StaleHandle: A group of a receipt has left the queue.
            SchemaError: A column is not written, or was not when the lease was claimed.
        """
        return codec.concat(await self.get_each(source, columns))

    async def get_each(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> list[dict[str, Column]]:
        """Return the columns like ``get``, but per group, as views without copies."""
        return await self._run(self._protocol.get(source, columns))

    async def get_tensordict(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> "TensorDict":
        """Return the columns like ``get``, as a TensorDict of batch size [rows]; ragged ones are jagged."""
        from offbeat.transfer_queue import tensordict_codec  # noqa: PLC0415 - loads torch

        return tensordict_codec.tensordict_of(await self.get(source, columns))

    async def ack(self, lease: ClientLease, *, clear: bool = False) -> None:
        """Mark the groups as consumed by this task; with ``clear``, remove them for every task.

        Raises:
            LeaseExpired: The lease had ended before; the groups are offered to others.
        """
        lease.settle()
        await self._run(single_request(wire.Ack(lease.id, clear), NoneType))

    async def release(self, lease: ClientLease) -> None:
        """Return the groups to the queue, at their old places.

        Raises:
            LeaseExpired: The lease had ended before.
        """
        lease.settle()
        await self._run(single_request(wire.Release(lease.id), NoneType))

    async def renew(self, lease: ClientLease, lease_s: float = LEASE_S) -> None:
        """Keep the groups for ``lease_s`` seconds from now.

        Raises:
            LeaseExpired: The lease had ended before.
        """
        renewed = await self._run(single_request(wire.Renew(lease.id, lease_s), records.Lease))
        lease.expires_at = renewed.expires_at

    async def clear(self, receipts: Iterable[PutReceipt]) -> int:
        """Remove groups, leased or not; return how many were in the queue."""
        return await self._run(single_request(wire.Clear(tuple(receipts)), int))

    async def clear_partition(self, partition: str) -> int:
        """Remove all groups of a partition; return how many there were."""
        return await self._run(single_request(wire.ClearPartition(partition), int))

    async def report_lost(self, receipts: Iterable[PutReceipt], reason: str) -> None:
        """Report payloads as unreadable: the groups leave the queue, listed by ``take_lost``."""
        await self._run(single_request(wire.ReportLost(tuple(receipts), reason), NoneType))

    async def take_lost(self, partition: str) -> list[LostGroup]:
        """Return the groups lost since the last call.

        They have to be made again, as newer attempts.
        """
        return await self._run(self._protocol.take_lost(partition))

    async def stats(self) -> ServiceStats:
        """Return statistics of the stored groups, the waiting clients, and the memory in use."""
        return await self._run(single_request(wire.GetStats(), ServiceStats))

    async def snapshot(self, directory: str, deadline_s: float = SNAPSHOT_S) -> int:
        """Have the service write its state to a directory on its node; how many payloads there are.

        Return the number of payloads.

        The state is that of one moment, whatever goes on meanwhile. The directory appears
        completely or not at all; an existing one is replaced.

        Raises:
            SnapshotFailed: It could not be written.
        """
        return await self._run(single_request(wire.SaveTo(directory), int, deadline_s))

    async def close(self) -> None:
        """Disconnect: the leases of this client end. Views of payloads stay valid."""
        try:
            if not self.link.closed:
                await self._run(single_request(wire.Leave(), NoneType))
        finally:
            self.link.close()
            self._protocol.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                reply = await self.link.exchange(
                    request.op, self._protocol.unpinned(), request.wait_s
                )
                request = exchange.send(wire.value_of(request.op, reply))
        except StopIteration as end:
            return end.value
