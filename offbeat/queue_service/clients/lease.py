"""Groups lent to a consumer, together with what it takes to read them."""

from collections.abc import Sequence

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core import records
from offbeat.queue_service.core.records import PutReceipt
from offbeat.queue_service.storage.arenas import Bytes
from offbeat.queue_service.storage.blocks import Blocks
from offbeat.queue_service.wire import Piece
from offbeat.transfer_queue import codec
from offbeat.transfer_queue.codec import Column


class MemoryGone(LookupError):
    """The memory of a payload cannot be mapped any more."""


class GroupPayloads:
    """The payloads of one group, each with its memory; None for memory that is not there any more."""

    def __init__(self, blocks: Blocks, pieces: Sequence[tuple[Piece, Bytes | None]]) -> None:
        self._blocks = blocks
        self._pieces = sorted(pieces, key=lambda each: each[0].start)

    def columns(self, names: Sequence[str] | None) -> dict[str, Column]:
        """The named columns, or all: views of the memory, or copies of those written in pieces.

        Raises:
            SchemaError: A column was not written when the group was claimed.
            MemoryGone: What it is read from is not there.
            CorruptPayload: What is there is no payload.
        """
        found: dict[str, Column] = {}
        wanted = None if names is None else frozenset(names)
        for piece, block in self._pieces:
            if wanted is not None and wanted.isdisjoint(piece.columns):
                continue
            if block is None:
                raise MemoryGone("its memory is gone")
            columns = self._blocks.columns_in(piece.payload.header, block)
            for name, column in columns.items():
                if wanted is None or name in wanted:
                    found[name] = _joined(name, found[name], column) if name in found else column
        if names is None:
            return found
        for name in names:
            if name not in found:
                written = {each: None for piece, _ in self._pieces for each in piece.columns}
                raise SchemaError(name, "not written", f"one that is: {', '.join(written)}")
        return {name: found[name] for name in names}


def _joined(name: str, earlier: Column, later: Column) -> Column:
    return codec.concat([{name: earlier}, {name: later}])[name]


class ClientLease:
    """Groups lent until ``expires_at``, oldest put first. Ack or release it, or they come again.

    It keeps the groups' memory readable until it is settled or dropped; views taken of it keep it
    themselves, as long as they live.
    """

    def __init__(self, lease: records.Lease, parcels: list[GroupPayloads]) -> None:
        self.id = lease.id
        self.partition, self.task = lease.partition, lease.task
        self.receipts: tuple[PutReceipt, ...] = lease.receipts
        self.expires_at = lease.expires_at
        """Seconds, on the clock of the service (on its node: the monotonic clock)."""
        self._parcels: list[GroupPayloads] | None = parcels

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, task={self.task!r}, groups={len(self.receipts)})"

    def parcels(self) -> list[GroupPayloads]:
        """Return the payloads that the groups are read from.

        Raises:
            LookupError: The lease was acked or released.
        """
        if self._parcels is None:
            raise LookupError(f"{self!r} was acked or released")
        return self._parcels

    def settle(self) -> None:
        """Let go of the memory."""
        self._parcels = None
