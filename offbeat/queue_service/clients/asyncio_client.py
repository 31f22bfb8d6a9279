"""The client for one event loop."""

from collections.abc import Iterable, Sequence
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from offbeat.queue_service import wire
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.clients.links import LoopCarrier, LoopLink, anchor
from offbeat.queue_service.clients.protocol import Asking, ClientProtocol, Declared, asked
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
    """Puts, claims and reads groups, from one event loop; any number of calls at a time.

    Every call has a deadline; a service that dies raises ``ActorLost``, one that hangs
    ``DeadlineExceeded``. Cancelling a call that waits takes it back.
    """

    def __init__(self, link: LoopCarrier, say: ClientProtocol) -> None:
        """Make it of what carries its calls; ``connect`` is the usual way."""
        self.link = link
        self._say = say

    @property
    def maps(self) -> bool:
        """Return whether memory is shared with the service, so that reading copies nothing."""
        return self._say.maps

    @classmethod
    async def connect(
        cls, path: str, queue: str = "queue", answer_s: float = ANSWER_S, *, maps: bool = True
    ) -> Self:
        """A client of the service that listens on a Unix socket.

        Args:
            path: Of the socket.
            queue: What errors call the service.
            answer_s: Most seconds for any answer, beyond those a call may wait.
            maps: Share memory with the service where that works; else payloads go through the
                socket.

        Raises:
            ActorLost: Nobody listens there.
        """
        say = ClientProtocol()
        link = await LoopLink.connect(path, queue, answer_s, say.freed, maps=maps)
        say.maps = link.maps
        say.anchored(anchor(path, queue, link.client))
        return cls(link, say)

    @classmethod
    def over(cls, link: LoopCarrier) -> Self:
        """A client whose payloads travel inside its calls: on another node than the service."""
        return cls(link, ClientProtocol())

    async def declare(
        self, partition: str, columns: Iterable[Declared], consumers: Sequence[str] = ()
    ) -> None:
        """Make a partition; the same declaration again changes nothing.

        Args:
            partition: Its name.
            columns: What groups may have: ``ColumnSpec``, ``(name, dtype)`` or ``(name, dtype,
                ragged)``.
            consumers: Tasks that each read every group: one that all of them acked is cleared.

        Raises:
            SchemaError: It is declared otherwise.
        """
        await self._run(self._say.declare(partition, columns, consumers))

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
        """Put a group, all or nothing. When this returns it can be claimed, and survives this process.

        Putting it again with the same attempt and columns changes nothing; a newer attempt replaces
        an older one. The columns are copied, and the caller's again.

        Args:
            partition: A declared one.
            group: Its name; one of that name rests in a partition at a time.
            columns: Name to dense array [rows, ...], ``Ragged`` or list, all of as many rows.
            tags: Small values, one per row, which travel with the receipt and which claims select
                by.
            attempt: Which making of the group this is.
            deadline_s: Seconds to wait for room, behind those who wait already.

        Raises:
            QueueFull: There was no room in time; it says what was short. ``TooLarge``: there never
                is.
            StaleHandle: A newer attempt, or other columns of this one, were put before.
            SchemaError: A column is not as declared.
            UnknownPartition: The partition is not declared.
        """
        asking = self._say.put(partition, group, columns, tags, attempt, deadline_s)
        return await self._run(asking)

    async def add_columns(
        self, receipt: PutReceipt, columns: Columns, rows: slice | None = None
    ) -> PutReceipt:
        """Write further columns of a group, or of some of its rows. Repeated, it changes nothing.

        Never waits for room: a full queue drains only if its groups are completed.

        Raises:
            StaleHandle: The group is gone, or replaced by a newer attempt.
            SchemaError: Not as declared, of other rows, or written already in part.
        """
        return await self._run(self._say.add_columns(receipt, columns, rows))

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
        """Borrow the next groups of a task: oldest first, each to one consumer of the task at a time.

        Waits where the groups are: the put that completes them is what answers.

        Args:
            partition: A declared one.
            task: Every task is given every group.
            n: How many groups at most.
            columns: Which have to be written; a task always asks for the same.
            where: ``(tag, operator, value)`` clauses that hold for all rows of a group.
            at_least: How many groups at least; ``n`` unless told.
            deadline_s: Seconds to wait for them; 0 takes what is there.
            lease_s: Seconds until the groups are given to others, unless renewed, acked or
                released.

        Returns:
            None if there were too few in time.
        """
        asking = self._say.claim(partition, task, n, at_least, columns, where, lease_s, deadline_s)
        return await self._run(asking)

    async def get(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> dict[str, Column]:
        """The rows of the groups, in order. One group's columns are views; several are copied together.

        Views are read-only, and stay as they are as long as they live, whatever becomes of the
        group.

        Raises:
            QueuePayloadLost: A payload cannot be read; the group has left the queue, reported lost.
            StaleHandle: A group of a receipt is gone.
            SchemaError: A column is not written, or was not yet when the lease was claimed.
        """
        return codec.concat(await self.get_each(source, columns))

    async def get_each(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> list[dict[str, Column]]:
        """Return the columns like ``get``, but per group, as views without copies."""
        return await self._run(self._say.get(source, columns))

    async def get_tensordict(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> "TensorDict":
        """Return the columns like ``get``, as a TensorDict of batch size [rows]; ragged ones are jagged."""
        from offbeat.transfer_queue import tensordict_codec  # noqa: PLC0415 - loads torch

        return tensordict_codec.tensordict_of(await self.get(source, columns))

    async def ack(self, lease: ClientLease, *, clear: bool = False) -> None:
        """The groups are consumed: this task is not given them again. ``clear``: nobody is.

        Raises:
            LeaseExpired: It ended before; the groups are given to others.
        """
        lease.settle()
        await self._run(asked(wire.Ack(lease.id, clear), NoneType))

    async def release(self, lease: ClientLease) -> None:
        """Give the groups back, to their old places.

        Raises:
            LeaseExpired: It ended before.
        """
        lease.settle()
        await self._run(asked(wire.Release(lease.id), NoneType))

    async def renew(self, lease: ClientLease, lease_s: float = LEASE_S) -> None:
        """Keep the groups for ``lease_s`` seconds from now.

        Raises:
            LeaseExpired: It ended before.
        """
        renewed = await self._run(asked(wire.Renew(lease.id, lease_s), records.Lease))
        lease.expires_at = renewed.expires_at

    async def clear(self, receipts: Iterable[PutReceipt]) -> int:
        """Let go of groups, leased or not; how many were there."""
        return await self._run(asked(wire.Clear(tuple(receipts)), int))

    async def clear_partition(self, partition: str) -> int:
        """Let go of all groups of a partition; how many there were."""
        return await self._run(asked(wire.ClearPartition(partition), int))

    async def report_lost(self, receipts: Iterable[PutReceipt], reason: str) -> None:
        """Say that payloads cannot be read: the groups leave the queue, listed by ``take_lost``."""
        await self._run(asked(wire.ReportLost(tuple(receipts), reason), NoneType))

    async def take_lost(self, partition: str) -> list[LostGroup]:
        """The groups lost since this was last asked: to be made again, as newer attempts."""
        return await self._run(self._say.take_lost(partition))

    async def stats(self) -> ServiceStats:
        """Return statistics of the stored groups, the waiting clients, and the memory in use."""
        return await self._run(asked(wire.GetStats(), ServiceStats))

    async def snapshot(self, directory: str, deadline_s: float = SNAPSHOT_S) -> int:
        """Have the service write its state to a directory on its node; how many payloads there are.

        The state is that of one moment, whatever goes on meanwhile. The directory is there whole or
        not at all; one that was there is replaced.

        Raises:
            SnapshotFailed: It could not be written.
        """
        return await self._run(asked(wire.SaveTo(directory), int, deadline_s))

    async def close(self) -> None:
        """Leave: what this client has leased goes back. Views of payloads stay as they are."""
        try:
            if not self.link.closed:
                await self._run(asked(wire.Leave(), NoneType))
        finally:
            self.link.close()
            self._say.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, asking: Asking[T]) -> T:
        try:
            ask = next(asking)
            while True:
                reply = await self.link.exchange(ask.op, self._say.unpinned(), ask.wait_s)
                ask = asking.send(wire.value_of(ask.op, reply))
        except StopIteration as end:
            return end.value
