"""Leased groups, and the payloads to read them from."""

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
    """Payloads of one group, each with its memory; None for memory that is no longer there."""

    def __init__(self, blocks: Blocks, pieces: Sequence[tuple[Piece, Bytes | None]]) -> None:
        self._blocks = blocks
        self._pieces = sorted(pieces, key=lambda each: each[0].start)

    def columns(self, names: Sequence[str] | None) -> dict[str, Column]:
        """Return the named columns, or all, as views; columns written in pieces are copied.

        Raises:
            SchemaError: A column was not written when the group was claimed.
            MemoryGone: The memory of a column is no longer there.
            CorruptPayload: The memory does not hold a valid payload.
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
    """Groups leased until ``expires_at``, oldest put first. Unless acked, they are delivered again.

    The lease keeps the groups' memory readable until it is acked, released or dropped; views keep
    their memory themselves, as long as they live.
    """

    def __init__(self, lease: records.Lease, payloads: list[GroupPayloads]) -> None:
        self.id = lease.id
        self.partition, self.task = lease.partition, lease.task
        self.receipts: tuple[PutReceipt, ...] = lease.receipts
        self.expires_at = lease.expires_at
        """Seconds, on the clock of the service (on its node: the monotonic clock)."""
        self._payloads: list[GroupPayloads] | None = payloads

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, task={self.task!r}, groups={len(self.receipts)})"

    def payloads(self) -> list[GroupPayloads]:
        """Payloads that the groups are read from.

        Raises:
            LookupError: The lease was acked or released.
        """
        if self._payloads is None:
            raise LookupError(f"{self!r} was acked or released")
        return self._payloads

    def settle(self) -> None:
        """Drop the references to the groups' memory."""
        self._payloads = None
