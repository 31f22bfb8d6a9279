"""The blocking client: for plain programs, and for the methods of Ray actors."""

from collections.abc import Iterable, Sequence
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from offbeat.queue_service import wire
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.clients.links import BlockingCarrier, BlockingLink, anchor
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


class SyncTransferQueueClient:
    """Puts, claims and reads groups; every call blocks. May be used from several threads.

    Every call has a deadline; a service that dies raises ``ActorLost``, one that hangs
    ``DeadlineExceeded``.
    """

    def __init__(self, link: BlockingCarrier, say: ClientProtocol) -> None:
        """Make it of what carries its calls; ``connect`` is the usual way."""
        self.link = link
        self._say = say

    @property
    def maps(self) -> bool:
        """Return whether memory is shared with the service, so that reading copies nothing."""
        return self._say.maps

    @classmethod
    def connect(
        cls, path: str, queue: str = "queue", answer_s: float = ANSWER_S, *, maps: bool = True
    ) -> Self:
        """See ``TransferQueueClient.connect``."""
        say = ClientProtocol()
        link = BlockingLink(path, queue, answer_s, say.freed, maps=maps)
        say.maps = link.maps
        say.anchored(anchor(path, queue, link.client))
        return cls(link, say)

    @classmethod
    def over(cls, link: BlockingCarrier) -> Self:
        """A client whose payloads travel inside its calls: on another node than the service."""
        return cls(link, ClientProtocol())

    def declare(
        self, partition: str, columns: Iterable[Declared], consumers: Sequence[str] = ()
    ) -> None:
        """See ``TransferQueueClient.declare``."""
        self._run(self._say.declare(partition, columns, consumers))

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
        """See ``TransferQueueClient.put``."""
        asking = self._say.put(partition, group, columns, tags, attempt, deadline_s)
        return self._run(asking)

    def add_columns(
        self, receipt: PutReceipt, columns: Columns, rows: slice | None = None
    ) -> PutReceipt:
        """See ``TransferQueueClient.add_columns``."""
        return self._run(self._say.add_columns(receipt, columns, rows))

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
        """See ``TransferQueueClient.claim``."""
        asking = self._say.claim(partition, task, n, at_least, columns, where, lease_s, deadline_s)
        return self._run(asking)

    def get(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> dict[str, Column]:
        """See ``TransferQueueClient.get``."""
        return codec.concat(self.get_each(source, columns))

    def get_each(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> list[dict[str, Column]]:
        """Return the columns like ``get``, but per group, as views without copies."""
        return self._run(self._say.get(source, columns))

    def get_tensordict(
        self,
        source: ClientLease | PutReceipt | Sequence[PutReceipt],
        columns: Sequence[str] | None = None,
    ) -> "TensorDict":
        """Return the columns like ``get``, as a TensorDict of batch size [rows]; ragged ones are jagged."""
        from offbeat.transfer_queue import tensordict_codec  # noqa: PLC0415 - loads torch

        return tensordict_codec.tensordict_of(self.get(source, columns))

    def ack(self, lease: ClientLease, *, clear: bool = False) -> None:
        """See ``TransferQueueClient.ack``."""
        lease.settle()
        self._run(asked(wire.Ack(lease.id, clear), NoneType))

    def release(self, lease: ClientLease) -> None:
        """See ``TransferQueueClient.release``."""
        lease.settle()
        self._run(asked(wire.Release(lease.id), NoneType))

    def renew(self, lease: ClientLease, lease_s: float = LEASE_S) -> None:
        """See ``TransferQueueClient.renew``."""
        renewed = self._run(asked(wire.Renew(lease.id, lease_s), records.Lease))
        lease.expires_at = renewed.expires_at

    def clear(self, receipts: Iterable[PutReceipt]) -> int:
        """Let go of groups, leased or not; how many were there."""
        return self._run(asked(wire.Clear(tuple(receipts)), int))

    def clear_partition(self, partition: str) -> int:
        """Let go of all groups of a partition; how many there were."""
        return self._run(asked(wire.ClearPartition(partition), int))

    def report_lost(self, receipts: Iterable[PutReceipt], reason: str) -> None:
        """Say that payloads cannot be read: the groups leave the queue, listed by ``take_lost``."""
        self._run(asked(wire.ReportLost(tuple(receipts), reason), NoneType))

    def take_lost(self, partition: str) -> list[LostGroup]:
        """The groups lost since this was last asked: to be made again, as newer attempts."""
        return self._run(self._say.take_lost(partition))

    def stats(self) -> ServiceStats:
        """Return statistics of the stored groups, the waiting clients, and the memory in use."""
        return self._run(asked(wire.GetStats(), ServiceStats))

    def snapshot(self, directory: str, deadline_s: float = SNAPSHOT_S) -> int:
        """See ``TransferQueueClient.snapshot``."""
        return self._run(asked(wire.SaveTo(directory), int, deadline_s))

    def close(self) -> None:
        """Leave: what this client has leased goes back. Views of payloads stay as they are."""
        try:
            if not self.link.closed:
                self._run(asked(wire.Leave(), NoneType))
        finally:
            self.link.close()
            self._say.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, asking: Asking[T]) -> T:
        try:
            ask = next(asking)
            while True:
                reply = self.link.exchange(ask.op, self._say.unpinned(), ask.wait_s)
                ask = asking.send(wire.value_of(ask.op, reply))
        except StopIteration as end:
            return end.value
