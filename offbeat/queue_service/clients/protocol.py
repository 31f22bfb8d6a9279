"""Client side of each request, independent of the transport: payloads written, read and released.

Each operation is a generator: it yields an ``Request`` and is sent the answer. The clients only
    carry
the asks, one blocking, one on an event loop, so both do the same.
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
"""A column: its spec, or ``(name, dtype)``, or ``(name, dtype, ragged)``."""

INLINE_BYTES: Final = 64 << 10
"""Smaller payloads travel in the message."""
TOLD_AT_ONCE_BYTES: Final = 1 << 20
"""Bytes of unviewed memory that are reported to the service at once, not with the next call."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call: the service answers within ``wait_s`` and what answering takes."""

    op: wire.Op
    wait_s: float = 0.0


Asking = Generator[Request, Any, T]


def asked(op: wire.Op, kind: type[T], wait_s: float = 0.0) -> Asking[T]:
    """A single question, answered with a ``kind``."""
    answer = yield Request(op, wait_s)
    assert isinstance(answer, kind)  # noqa: S101 - ``wire`` decodes to it
    return answer


def _spec(column: Declared) -> ColumnSpec:
    if isinstance(column, ColumnSpec):
        return column
    return ColumnSpec(*cast("tuple[str, str, bool]", column))  # or without the last


class ClientProtocol:
    """One client's payload memory, and what it says.

    May be used from several threads.
    """

    def __init__(self) -> None:
        self.maps = False  # payloads go through shared memory; else inside the messages
        self._blocks = Blocks()
        self._writer, self._lock = Writer(), threading.Lock()
        self._unpinned: deque[Slot] = deque()
        self._reader = Reader(self._gone)
        self._untold = 0
        self._anchor: socket.socket | None = None
        self._closed = False

    def anchored(self, anchor: socket.socket) -> None:
        """Keep this connection open: until it ends, the service keeps what we view."""
        self._anchor = anchor

    def close(self) -> None:
        """The anchor goes with the last view."""
        self._closed = True
        self._drop_anchor()
        self._reader.close()
        with self._lock:
            self._writer.close()

    def _gone(self, slot: Slot, nbytes: int) -> None:
        """Record that a view is gone. Small ones are reported with the next call, large ones at once."""
        self._unpinned.append(slot)
        self._untold += nbytes
        if self._closed:
            self._drop_anchor()
        elif self._untold >= TOLD_AT_ONCE_BYTES and self._anchor is not None:
            slots = self.unpinned()
            try:
                self._anchor.send(one_way(Nothing(), slots), socket.MSG_DONTWAIT)
            except OSError:  # the service is gone, or busy: then the next call says it
                self._unpinned.extend(slots)

    def _drop_anchor(self) -> None:
        if self._anchor is not None and not self._reader.has_views:
            self._anchor.close()

    def unpinned(self) -> tuple[Slot, ...]:
        """The slots no view reads any more, since last asked; they go with the next call."""
        gone, slots = self._unpinned, list[Slot]()
        self._untold = 0
        while gone:
            try:
                slots.append(gone.popleft())
            except IndexError:  # another thread took it
                break
        return tuple(slots)

    def freed(self, slots: Sequence[Slot]) -> None:
        """Slots that are ours to write to again."""
        with self._lock:
            self._writer.freed(slots)

    # --- producing ---------------------------------------------------------------------------

    def declare(
        self,
        partition: str,
        columns: Iterable[Declared],
        consumers: Sequence[str],
    ) -> Asking[None]:
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
    ) -> Asking[PutReceipt]:
        block = self._blocks.of(columns)
        rows, specs = block.shape.rows, block.shape.specs
        plain = checked_tags(tags, rows)
        payload, nbytes = yield from self._stored(block)
        op = wire.Put(partition, group, attempt, rows, specs, plain, nbytes, payload, deadline_s)
        return (yield Request(op, deadline_s))

    def add_columns(
        self, receipt: PutReceipt, columns: Columns, rows: slice | None
    ) -> Asking[PutReceipt]:
        start, stop, step = (slice(None) if rows is None else rows).indices(receipt.rows)
        block = self._blocks.of(columns)
        if step != 1 or block.shape.rows != stop - start:
            want = f"{stop - start} rows, for {start} to {stop - 1} of the group, without a step"
            raise SchemaError(next(iter(columns), "*"), f"{block.shape.rows} rows", want)
        payload, nbytes = yield from self._stored(block)
        op = wire.AddColumns(receipt, block.shape.specs, start, stop, nbytes, payload)
        return (yield Request(op))

    def _stored(self, block: Block) -> Asking[tuple[WirePayload, int]]:
        """Columns where the service can reach them, and their bytes."""
        header, nbytes = block.shape.header, block.shape.nbytes
        if nbytes < INLINE_BYTES or not self.maps:
            memory = np.empty(nbytes, np.uint8)
            block.write(memory)
            return WirePayload(header, nbytes, memory.tobytes()), nbytes
        taken = self._take(nbytes)
        if taken is None:  # the answer may bring slots back
            yield Request(Nothing())
            taken = self._take(nbytes)
        while taken is None:
            arena: Arena = yield Request(wire.Borrow(nbytes))
            with self._lock:
                self._writer.lend(arena)
            taken = self._take(nbytes)
        slot, memory = taken
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
    ) -> Asking[ClientLease | None]:
        least = n if at_least is None else at_least
        names = tuple(columns)
        op = wire.Claim(partition, task, n, least, names, normal(where), lease_s, deadline_s)
        delivery: Delivery | None = yield Request(op, deadline_s)
        if delivery is None:
            return None
        return ClientLease(delivery.lease, self._parcels(delivery.parcels))

    def get(
        self, source: ClientLease | PutReceipt | Sequence[PutReceipt], names: Sequence[str] | None
    ) -> Asking[list[dict[str, Column]]]:
        """The columns of each group, oldest first."""
        if isinstance(source, ClientLease):
            receipts, parcels = source.receipts, source.parcels()
        else:
            receipts = (source,) if isinstance(source, PutReceipt) else tuple(source)
            located: Deliveries = yield Request(wire.Locate(receipts))
            parcels = self._parcels(located)
        groups = list[dict[str, Column]]()
        for receipt, parcel in zip(receipts, parcels, strict=True):
            try:
                groups.append(parcel.columns(names))
            except (MemoryGone, codec.CorruptPayload) as error:
                reason = str(error)
                yield Request(wire.ReportLost((receipt,), reason))
                raise QueuePayloadLost(receipt.group, receipt.attempt, reason) from None
        return groups

    def take_lost(self, partition: str) -> Asking[list[LostGroup]]:
        return (yield Request(wire.TakeLost(partition)))

    def _parcels(self, parcels: Deliveries) -> list[GroupPayloads]:
        """The groups' payloads; from here on a slot is ours until nothing refers to it."""
        arenas = {arena.id: arena for arena in parcels.arenas}
        return [
            GroupPayloads(
                self._blocks, [(piece, self._block(piece.payload, arenas)) for piece in group]
            )
            for group in parcels.groups
        ]

    def _block(self, payload: WirePayload, arenas: Mapping[int, Arena]) -> Bytes | None:
        slot = payload.slot
        if slot is None:
            return np.frombuffer(payload.inline or b"", np.uint8)
        try:
            return self._reader.view(arenas[slot.arena], slot, payload.nbytes)
        except (FileNotFoundError, PermissionError):  # it is not there, or not for us
            self._unpinned.append(slot)
            return None
        except OSError:  # it is there; this process is short of files or memory
            self._unpinned.append(slot)
            raise
