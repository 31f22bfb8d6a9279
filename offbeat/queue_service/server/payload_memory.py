"""Memory of the payloads: which slots clients may write, which are read, and which are free."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core.records import Part
from offbeat.queue_service.storage.arenas import Arena, ArenaAllocator, Bytes, Slot, Writer
from offbeat.queue_service.wire import Deliveries, Piece, WirePayload

_SERVICE: Final = "the service"
WARM_BYTES: Final = 64 << 20
"""Free memory that is kept for the next payloads: fresh memory costs one page fault per page."""
MOVED_ABOVE: Final = 64 << 10
"""Size in bytes above which payloads that came in a message are moved to shared memory."""


class PayloadMemory:
    """Counts, for each slot, its payload and the views of it.

    The views of a client are pins, which the client removes itself; if it dies, they end with it.
    """

    def __init__(self, arenas: ArenaAllocator, path: str) -> None:
        """``path`` is that of the service's socket."""
        self._arenas = arenas
        self._path = path.encode()
        self._probe: Arena | None = None
        self._pins: dict[str, Counter[Slot]] = {}
        self._writer = Writer()

    @property
    def arena_bytes(self) -> int:
        return self._arenas.bytes_in_use

    @property
    def has_excess(self) -> bool:
        return self._arenas.has_excess

    def probe(self) -> Arena:
        """Return a page that begins with the path of the socket."""
        if self._probe is None:
            self._probe = self._arenas.probe(self._path)
        return self._probe

    def lend(self, client: str, nbytes: int) -> Arena:
        return self._arenas.make(client, nbytes)

    def announce(self, client: str) -> tuple[Slot, ...]:
        return tuple(self._arenas.announce(client))

    def cool(self) -> None:
        self._arenas.cool(WARM_BYTES)

    def store(self, client: str, payload: WirePayload) -> WirePayload:
        """Store a payload; return it as it is kept. It has to be dropped once.

        Raises:
            SchemaError: Its slot was not lent to the client, or holds another payload.
        """
        nbytes = payload.nbytes
        if payload.slot is not None:
            if not self._arenas.owns(client, payload.slot, nbytes):
                raise SchemaError("*", f"{payload.slot}", f"a free slot lent to {client}")
            self._arenas.hold(payload.slot, nbytes)
            return payload
        inline = payload.inline or b""
        if len(inline) != nbytes:
            raise SchemaError("*", f"{len(inline)} bytes", f"{nbytes} bytes, as it says")
        if nbytes < MOVED_ABOVE:
            return payload
        return self._moved(payload, inline, nbytes)

    def drop(self, payload: WirePayload) -> None:
        """Drop one reference to a payload; its memory is free once no view of it is left."""
        if payload.slot is not None:
            self._arenas.let_go(payload.slot)

    def kept(self, payload: WirePayload) -> WirePayload:
        """Add a reference to a payload: it has to be dropped once more."""
        if payload.slot is not None:
            self._arenas.pin(payload.slot)
        return payload

    def deliver(self, client: str, groups: Iterable[Sequence[Part]], *, maps: bool) -> Deliveries:
        """Return the groups' payloads for a client; their slots are pinned for it."""
        arenas: dict[int, Arena] = {}
        deliveries: list[tuple[Piece, ...]] = []
        for parts in groups:
            pieces: list[Piece] = []
            for part in parts:
                payload: WirePayload = part.payload
                if payload.slot is not None and maps:
                    arenas[payload.slot.arena] = self._arenas.arena(payload.slot)
                    self._arenas.pin(payload.slot)
                    self._pins.setdefault(client, Counter())[payload.slot] += 1
                elif payload.slot is not None:
                    payload = WirePayload(payload.header, payload.nbytes, self.bytes_of(payload))
                pieces.append(Piece(part.columns, part.start, part.stop, payload))
            deliveries.append(tuple(pieces))
        return Deliveries(tuple(deliveries), tuple(arenas.values()))

    def unpin(self, client: str, slots: Iterable[Slot]) -> None:
        """Remove the pins of views that the client has dropped."""
        for slot in slots:
            pins = self._pins.get(client, Counter[Slot]())
            if pins[slot] > 0:
                pins[slot] -= 1
                if not pins[slot]:
                    del pins[slot]
                self._arenas.let_go(slot)

    def client_gone(self, client: str) -> None:
        """Release the views of a client that is gone; its payloads stay."""
        for slot in self._pins.pop(client, Counter[Slot]()).elements():
            self._arenas.let_go(slot)
        self._arenas.producer_gone(client)

    def bytes_of(self, payload: WirePayload) -> bytes:
        """Return a copy of the payload's bytes."""
        return self.block_of(payload).tobytes()

    def block_of(self, payload: WirePayload) -> Bytes:
        """Return a view of the payload's bytes, valid as long as the payload is kept."""
        if payload.slot is None:
            return np.frombuffer(payload.inline or b"", np.uint8)
        return self._arenas.read(payload.slot, payload.nbytes)

    def stored(self, payload: WirePayload) -> WirePayload:
        """Store a payload that was read from a file."""
        return self.store(_SERVICE, payload)

    def close(self) -> None:
        self._arenas.close()

    def _moved(self, payload: WirePayload, inline: bytes, nbytes: int) -> WirePayload:
        self._writer.freed(self._arenas.announce(_SERVICE))
        allocated = self._writer.take(nbytes)
        if allocated is None:
            self._writer.lend(self._arenas.make(_SERVICE, nbytes))
            allocated = self._writer.take(nbytes)
        assert allocated is not None  # noqa: S101 - an arena was made for it
        slot, block = allocated
        block.data[:] = inline
        self._arenas.hold(slot, nbytes)
        return msgspec.structs.replace(payload, inline=None, slot=slot)
