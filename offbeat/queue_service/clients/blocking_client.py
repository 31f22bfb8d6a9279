"""Blocking client of the queue service, for plain programs and the methods of Ray actors."""

from collections.abc import Iterable, Sequence
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from offbeat.queue_service import wire
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.clients.links import BlockingCarrier, BlockingLink, anchor
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


class SyncTransferQueueClient:
    """Blocking client: puts, claims and reads groups. May be used from several threads.

    Every call has a deadline; a service that dies raises ``ActorLost``, one that hangs
    ``DeadlineExceeded``.
    """

    def __init__(self, link: BlockingCarrier, protocol: ClientProtocol) -> None:
        """Create a client from the objects that carry its calls; use ``connect`` instead."""
        self.link = link
        self._protocol = protocol

    @property
    def maps(self) -> bool:
        """Return whether memory is shared with the service, so that reading copies nothing."""
        return self._protocol.maps

    @classmethod
    def connect(
        cls, path: str, queue: str = "queue", answer_s: float = ANSWER_S, *, maps: bool = True
    ) -> Self:
        """Connect through a Unix socket; see ``TransferQueueClient.connect``."""
        protocol = ClientProtocol()
        link = BlockingLink(path, queue, answer_s, protocol.freed, maps=maps)
        protocol.maps = link.maps
        protocol.anchored(anchor(path, queue, link.client))
        return cls(link, protocol)

    @classmethod
    def over(cls, link: BlockingCarrier) -> Self:
        """Return a client on another node than the service. Payloads travel inside its calls."""
        return cls(link, ClientProtocol())

    def declare(
        self, partition: str, columns: Iterable[Declared], consumers: Sequence[str] = ()
    ) -> None:
        """Create a partition; see ``TransferQueueClient.declare``."""
        self._run(self._protocol.declare(partition, columns, consumers))

    def put(
        self,
        partition: str,
        group: str,
        columns: Columns,
        tags: GivenTags = NO_TAGS,
        *,
        attempt: int = 0,
        deadline_s: float = ROOM_S,
    ) -> PutReceipt:
        """Put a group; see ``TransferQueueClient.put``."""
        exchange = self._protocol.put(partition, group, columns, tags, attempt, deadline_s)
        return self._run(exchange)

    def add_columns(
        self, receipt: PutReceipt, columns: Columns, rows: slice | None = None
    ) -> PutReceipt:
        """Write further columns of a group; see ``TransferQueueClient.add_columns``."""
        return self._run(self._protocol.add_columns(receipt, columns, rows))

    def claim(
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
        """Lease the next groups of a task; see ``TransferQueueClient.claim``."""
        exchange = self._protocol.claim(
            partition, task, n, at_least, columns, where, lease_s, deadline_s
        )
        return self._run(exchange)

    def get(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> dict[str, Column]:
        """Return the rows of the groups; see ``TransferQueueClient.get``."""
        return codec.concat(self.get_each(source, columns))

    def get_each(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> list[dict[str, Column]]:
        """Return the columns like ``get``, but per group, as views without copies."""
        return self._run(self._protocol.get(source, columns))

    def get_tensordict(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> "TensorDict":
        """Return the columns like ``get``, as a TensorDict of batch size [rows]; ragged ones are jagged."""
        from offbeat.transfer_queue import tensordict_codec  # noqa: PLC0415 - loads torch

        return tensordict_codec.tensordict_of(self.get(source, columns))

    def ack(self, lease: ClientLease, *, clear: bool = False) -> None:
        """Mark the groups as consumed; see ``TransferQueueClient.ack``."""
        lease.settle()
        self._run(single_request(wire.Ack(lease.id, clear), NoneType))

    def release(self, lease: ClientLease) -> None:
        """Return the groups to the queue; see ``TransferQueueClient.release``."""
        lease.settle()
        self._run(single_request(wire.Release(lease.id), NoneType))

    def renew(self, lease: ClientLease, lease_s: float = LEASE_S) -> None:
        """See ``TransferQueueClient.renew``."""
        renewed = self._run(single_request(wire.Renew(lease.id, lease_s), records.Lease))
        lease.expires_at = renewed.expires_at

    def clear(self, receipts: Iterable[PutReceipt]) -> int:
        """Remove groups, leased or not; return how many were in the queue."""
        return self._run(single_request(wire.Clear(tuple(receipts)), int))

    def clear_partition(self, partition: str) -> int:
        """Remove all groups of a partition; return how many there were."""
        return self._run(single_request(wire.ClearPartition(partition), int))

    def report_lost(self, receipts: Iterable[PutReceipt], reason: str) -> None:
        """Report payloads as unreadable: the groups leave the queue, listed by ``take_lost``."""
        self._run(single_request(wire.ReportLost(tuple(receipts), reason), NoneType))

    def take_lost(self, partition: str) -> list[LostGroup]:
        """Return the groups lost since the last call.

        They have to be made again, as newer attempts.
        """
        return self._run(self._protocol.take_lost(partition))

    def stats(self) -> ServiceStats:
        """Return statistics of the stored groups, the waiting clients, and the memory in use."""
        return self._run(single_request(wire.GetStats(), ServiceStats))

    def snapshot(self, directory: str, deadline_s: float = SNAPSHOT_S) -> int:
        """See ``TransferQueueClient.snapshot``."""
        return self._run(single_request(wire.SaveTo(directory), int, deadline_s))

    def close(self) -> None:
        """Disconnect: the leases of this client end. Views of payloads stay valid."""
        try:
            if not self.link.closed:
                self._run(single_request(wire.Leave(), NoneType))
        finally:
            self.link.close()
            self._protocol.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                reply = self.link.exchange(request.op, self._protocol.unpinned(), request.wait_s)
                request = exchange.send(wire.value_of(request.op, reply))
        except StopIteration as end:
            return end.value
