"""Client side of each request, independent of the transport.

Each operation is a generator: it yields a ``Request`` and is sent the reply. The clients only carry
the requests, one blocking, one on an event loop, so both do the same.
"""

import socket
import threading
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np

from offbeat.messages.failures import SchemaError
from offbeat.queue_service import wire
from offbeat.queue_service.clients.lease import ClientLease, GroupPayloads, MemoryGone
from offbeat.queue_service.core.records import (
    ColumnSpec,
    GivenTags,
    LostGroup,
    PutReceipt,
    Schema,
    Where,
)
from offbeat.queue_service.core.where import checked_tags, normal
from offbeat.queue_service.errors import QueuePayloadLost
from offbeat.queue_service.storage.arenas import Arena, Bytes, Reader, Slot, Writer
from offbeat.queue_service.storage.blocks import Block, Blocks
from offbeat.queue_service.wire import (
    Deliveries,
    Delivery,
    Nothing,
    WirePayload,
    one_way,
)
from offbeat.transfer_queue import codec
from offbeat.transfer_queue.codec import Column, Columns

T = TypeVar("T")
Declared = ColumnSpec | tuple[str, str] | tuple[str, str, bool]
"""Column declaration: a spec, or ``(name, dtype)``, or ``(name, dtype, ragged)``."""

INLINE_BYTES: Final = 64 << 10
"""Payloads smaller than this travel in the message."""
REPORTED_AT_ONCE_BYTES: Final = 1 << 20
"""Bytes of unpinned memory from which on it is reported at once, not with the next call."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call. The service replies after at most ``wait_s`` plus its processing time."""

    op: wire.Op
    wait_s: float = 0.0


Exchange = Generator[Request, Any, T]


def single_request(op: wire.Op, kind: type[T], wait_s: float = 0.0) -> Exchange[T]:
    """Yield a single request; return its reply, which is a ``kind``."""
    answer = yield Request(op, wait_s)
    assert isinstance(answer, kind)  # noqa: S101 - ``wire`` decodes to it
    return answer


def _spec(column: Declared) -> ColumnSpec:
    if isinstance(column, ColumnSpec):
        return column
    return ColumnSpec(*cast("tuple[str, str, bool]", column))  # with or without the third element


class ClientProtocol:
    """One client's payload memory, and the requests that it sends.

    May be used from several threads.
    """

    def __init__(self) -> None:
        self.maps = False  # whether payloads go through shared memory, or inside the messages
        self._blocks = Blocks()
        self._writer, self._lock = Writer(), threading.Lock()
        self._unpinned: deque[Slot] = deque()
        self._reader = Reader(self._gone)
        self._unreported_bytes = 0
        self._anchor: socket.socket | None = None
        self._closed = False

    def anchored(self, anchor: socket.socket) -> None:
        """Keep this connection open. Until it ends, the service keeps the memory of our views."""
        self._anchor = anchor

    def close(self) -> None:
        """Close; the anchor connection ends with the last view."""
        self._closed = True
        self._drop_anchor()
        self._reader.close()
        with self._lock:
            self._writer.close()

    def _gone(self, slot: Slot, nbytes: int) -> None:
        """Record that a view is gone.

        Small views are reported with the next call, large ones at once.
        """
        self._unpinned.append(slot)
        self._unreported_bytes += nbytes
        if self._closed:
            self._drop_anchor()
        elif self._unreported_bytes >= REPORTED_AT_ONCE_BYTES and self._anchor is not None:
            slots = self.unpinned()
            try:
                self._anchor.send(one_way(Nothing(), slots), socket.MSG_DONTWAIT)
            except OSError:  # the service is gone or busy: the next call reports it
                self._unpinned.extend(slots)

    def _drop_anchor(self) -> None:
        if self._anchor is not None and not self._reader.has_views:
            self._anchor.close()

    def unpinned(self) -> tuple[Slot, ...]:
        """Return the slots unpinned since the last call. They are sent with the next request."""
        gone, slots = self._unpinned, list[Slot]()
        self._unreported_bytes = 0
        while gone:
            try:
                slots.append(gone.popleft())
            except IndexError:  # another thread took it
                break
        return tuple(slots)

    def freed(self, slots: Sequence[Slot]) -> None:
        """Take back slots that this client may write to again."""
        with self._lock:
            self._writer.freed(slots)

    # --- producing ---------------------------------------------------------------------------

    def declare(
        self,
        partition: str,
        columns: Iterable[Declared],
        consumers: Sequence[str],
    ) -> Exchange[None]:
        specs = tuple(map(_spec, columns))
        yield Request(wire.Declare(partition, Schema(specs, tuple(consumers))))

    def put(
        self,
        partition: str,
        group: str,
        columns: Columns,
        tags: GivenTags,
        attempt: int,
        deadline_s: float,
    ) -> Exchange[PutReceipt]:
        block = self._blocks.of(columns)
        rows, specs = block.shape.rows, block.shape.specs
        plain = checked_tags(tags, rows)
        payload, nbytes = yield from self._stored(block)
        op = wire.Put(partition, group, attempt, rows, specs, plain, nbytes, payload, deadline_s)
        return (yield Request(op, deadline_s))

    def add_columns(
        self, receipt: PutReceipt, columns: Columns, rows: slice | None
    ) -> Exchange[PutReceipt]:
        start, stop, step = (slice(None) if rows is None else rows).indices(receipt.rows)
        block = self._blocks.of(columns)
        if step != 1 or block.shape.rows != stop - start:
            want = f"{stop - start} rows, for {start} to {stop - 1} of the group, without a step"
            raise SchemaError(next(iter(columns), "*"), f"{block.shape.rows} rows", want)
        payload, nbytes = yield from self._stored(block)
        op = wire.AddColumns(receipt, block.shape.specs, start, stop, nbytes, payload)
        return (yield Request(op))

    def _stored(self, block: Block) -> Exchange[tuple[WirePayload, int]]:
        """Store the columns where the service can read them; return the payload and its bytes."""
        header, nbytes = block.shape.header, block.shape.nbytes
        if nbytes < INLINE_BYTES or not self.maps:
            memory = np.empty(nbytes, np.uint8)
            block.write(memory)
            return WirePayload(header, nbytes, memory.tobytes()), nbytes
        allocated = self._take(nbytes)
        if allocated is None:  # the reply may return slots
            yield Request(Nothing())
            allocated = self._take(nbytes)
        while allocated is None:
            arena: Arena = yield Request(wire.Borrow(nbytes))
            with self._lock:
                self._writer.lend(arena)
            allocated = self._take(nbytes)
        slot, memory = allocated
        block.write(memory)
        return WirePayload(header, nbytes, None, slot), nbytes

    def _take(self, nbytes: int) -> tuple[Slot, Any] | None:
        with self._lock:
            return self._writer.take(nbytes)

    # --- consuming ---------------------------------------------------------------------------

    def claim(
        self,
        partition: str,
        task: str,
        n: int,
        at_least: int | None,
        columns: Sequence[str],
        where: Where,
        lease_s: float,
        deadline_s: float,
    ) -> Exchange[ClientLease | None]:
        least = n if at_least is None else at_least
        names = tuple(columns)
        op = wire.Claim(partition, task, n, least, names, normal(where), lease_s, deadline_s)
        delivery: Delivery | None = yield Request(op, deadline_s)
        if delivery is None:
            return None
        return ClientLease(delivery.lease, self._mapped(delivery.payloads))

    def get(
        self, source: ClientLease | PutReceipt | Sequence[PutReceipt], names: Sequence[str] | None
    ) -> Exchange[list[dict[str, Column]]]:
        """Return the columns of each group, oldest first."""
        if isinstance(source, ClientLease):
            receipts, payloads = source.receipts, source.payloads()
        else:
            receipts = (source,) if isinstance(source, PutReceipt) else tuple(source)
            located: Deliveries = yield Request(wire.Locate(receipts))
            payloads = self._mapped(located)
        groups = list[dict[str, Column]]()
        for receipt, group_payloads in zip(receipts, payloads, strict=True):
            try:
                groups.append(group_payloads.columns(names))
            except (MemoryGone, codec.CorruptPayload) as error:
                reason = str(error)
                yield Request(wire.ReportLost((receipt,), reason))
                raise QueuePayloadLost(receipt.group, receipt.attempt, reason) from None
        return groups

    def take_lost(self, partition: str) -> Exchange[list[LostGroup]]:
        return (yield Request(wire.TakeLost(partition)))

    def _mapped(self, payloads: Deliveries) -> list[GroupPayloads]:
        """Map the groups' payloads.

        Each slot stays pinned for this client until nothing refers to it.
        """
        arenas = {arena.id: arena for arena in payloads.arenas}
        return [
            GroupPayloads(
                self._blocks, [(piece, self._block(piece.payload, arenas)) for piece in group]
            )
            for group in payloads.groups
        ]

    def _block(self, payload: WirePayload, arenas: Mapping[int, Arena]) -> Bytes | None:
        slot = payload.slot
        if slot is None:
            return np.frombuffer(payload.inline or b"", np.uint8)
        try:
            return self._reader.view(arenas[slot.arena], slot, payload.nbytes)
        except (FileNotFoundError, PermissionError):  # not there, or no permission
            self._unpinned.append(slot)
            return None
        except OSError:  # it is there, but this process is short of file descriptors or memory
            self._unpinned.append(slot)
            raise
