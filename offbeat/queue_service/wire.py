"""Messages between clients and the service, in msgpack, which cannot carry code.

A frame is its length (4 bytes, little-endian) and a body: ``WireCall`` one way, ``Reply`` the
other. A client numbers its calls; replies may come in any order.
"""

from typing import Any, Final

import msgspec

from offbeat.messages import failures
from offbeat.messages.failures import OffbeatError
from offbeat.messages.framing import FrameBuffer, body_length, framed
from offbeat.queue_service import errors
from offbeat.queue_service.core.records import (
    ColumnSpec,
    Lease,
    LostGroup,
    PutReceipt,
    Schema,
    Stats,
    Tags,
    Where,
)
from offbeat.queue_service.errors import ServiceBug
from offbeat.queue_service.storage.arenas import Arena, Slot
from offbeat.transfer_queue import errors as queue_errors

MOST_FRAME_BYTES: Final = (2 << 30) - 1
"""A longer frame is none of ours: the connection is closed."""


class WirePayload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Columns of a group: the header of a ``Block``, and where its memory is: inline or in a slot."""

    header: bytes
    nbytes: int
    inline: bytes | None = None
    slot: Slot | None = None


class _Op(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Something a client asks for."""


class Attach(_Op, frozen=True):
    """First on every connection. Without a name, a new one is given; reply: the name.

    A client is gone when the last connection of that name has ended. ``maps``: it shares memory
    with the service; else payloads are sent to it inside the replies.
    """

    client: str | None
    maps: bool


class Probe(_Op, frozen=True):
    """Reply: an ``Arena`` that holds the socket's path: who can read it shares memory with us."""


class Leave(_Op, frozen=True):
    """The client asks nothing more: its leases go back. What it views stays as it is. Reply: None."""


class Declare(_Op, frozen=True):
    """Reply: None."""

    partition: str
    schema: Schema


class Borrow(_Op, frozen=True):
    """Another arena to write to, of at least ``nbytes``. Reply: ``Arena``."""

    nbytes: int


class Put(_Op, frozen=True):
    """A group; the slot of its payload is the service's from here, whatever comes. Reply: Receipt."""

    partition: str
    group: str
    attempt: int
    rows: int
    columns: bytes  # encoded list of ColumnSpec: the same ones are decoded once
    tags: Tags
    nbytes: int
    payload: WirePayload
    wait_s: float


class AddColumns(_Op, frozen=True):
    """Further columns of a group, for rows ``[start, stop)``. Reply: its Receipt, with new weight."""

    receipt: PutReceipt
    columns: bytes
    start: int
    stop: int
    nbytes: int
    payload: WirePayload


class Claim(_Op, frozen=True):
    """``n`` groups for a task, or what there is from ``at_least`` on, at once or within ``wait_s``.

    Reply: ``Delivery | None``.
    """

    partition: str
    task: str
    n: int
    at_least: int
    columns: tuple[str, ...]
    where: Where
    lease_s: float
    wait_s: float


class Ack(_Op, frozen=True):
    """Done with the lease; with ``clear``, its groups are cleared too. Reply: None."""

    lease: int
    clear: bool


class Release(_Op, frozen=True):
    """The groups go back, to be delivered again. Reply: None."""

    lease: int


class Renew(_Op, frozen=True):
    """The lease lasts ``lease_s`` from now. Reply: Lease."""

    lease: int
    lease_s: float


class Locate(_Op, frozen=True):
    """The payloads of groups that were not claimed here. Reply: ``Deliveries``."""

    receipts: tuple[PutReceipt, ...]


class Clear(_Op, frozen=True):
    """Reply: how many groups were there."""

    receipts: tuple[PutReceipt, ...]


class ClearPartition(_Op, frozen=True):
    """Reply: how many groups were there."""

    partition: str


class ReportLost(_Op, frozen=True):
    """Payloads that could not be read. Reply: None."""

    receipts: tuple[PutReceipt, ...]
    reason: str


class TakeLost(_Op, frozen=True):
    """Reply: list of ``LostGroup``, each reported once."""

    partition: str


class GetStats(_Op, frozen=True):
    """Reply: ``ServiceStats``."""


class SaveTo(_Op, frozen=True):
    """Write index and payloads to a directory. Reply: number of payloads written."""

    directory: str


class Nothing(_Op, frozen=True):
    """Carries the unpinned slots and no more. Reply: None."""


Op = (
    Attach | Probe | Leave | Declare | Borrow | Put | AddColumns | Claim | Ack | Release | Renew | Locate | Clear
    | ClearPartition | ReportLost | TakeLost | GetStats | SaveTo | Nothing
)  # fmt: skip


ONE_WAY: Final = 0


class WireCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A question. ``unpinned``: slots that no view of this client reads any more, one entry a view.

    A call with ``cancels`` is about the call of that id: if it still waits, it is answered with
        None
    at once. A call of id ``ONE_WAY`` is not answered.
    """

    id: int
    op: Op
    unpinned: tuple[Slot, ...] = ()
    cancels: int | None = None


class Failure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A typed error as its class name and its fields."""

    kind: str
    fields: tuple[Any, ...]


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To the call of this id. ``freed``: slots that are the client's to write to again."""

    id: int
    value: msgspec.Raw
    failure: Failure | None = None
    freed: tuple[Slot, ...] = ()


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One payload of a group: its columns, for rows ``[start, stop)``."""

    columns: tuple[str, ...]
    start: int
    stop: int
    payload: WirePayload


class Deliveries(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Payloads group by group, oldest first, and the arenas their slots are in."""

    groups: tuple[tuple[Piece, ...], ...]
    arenas: tuple[Arena, ...]


def slots_of(parcels: Deliveries) -> tuple[Slot, ...]:
    """The slots of these payloads, one entry a payload."""
    return tuple(
        piece.payload.slot
        for group in parcels.groups
        for piece in group
        if piece.payload.slot is not None
    )


class Delivery(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A lease together with what it takes to read it."""

    lease: Lease
    parcels: Deliveries


class ServiceStats(msgspec.Struct, frozen=True):
    """The queue's, and what the service itself holds and does."""

    queue: Stats
    clients: int
    arena_bytes: int  # of payloads in shared memory, held or still viewed by a reader
    calls: int  # answered since the start
    waited_s: dict[str, float]  # by kind of call: time calls waited for what they asked
    wakes: int  # calls that waited and were served
    wake_p99_s: float  # from the change that served one, such as a put, to its answer


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(WireCall).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode

ARENA: Final = msgspec.msgpack.Decoder(Arena)
NAME: Final = msgspec.msgpack.Decoder(str)
DELIVERY: Final = msgspec.msgpack.Decoder(Delivery | None)
_NOTHING: Final = msgspec.msgpack.Decoder(type(None))
_RECEIPT: Final = msgspec.msgpack.Decoder(PutReceipt)
_COUNT: Final = msgspec.msgpack.Decoder(int)
_VALUES: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    Attach: NAME,
    Probe: ARENA,
    Borrow: ARENA,
    Put: _RECEIPT,
    AddColumns: _RECEIPT,
    Claim: DELIVERY,
    Renew: msgspec.msgpack.Decoder(Lease),
    Locate: msgspec.msgpack.Decoder(Deliveries),
    Clear: _COUNT,
    ClearPartition: _COUNT,
    TakeLost: msgspec.msgpack.Decoder(list[LostGroup]),
    GetStats: msgspec.msgpack.Decoder(ServiceStats),
    SaveTo: _COUNT,
}


_SPECS: Final = msgspec.msgpack.Decoder(tuple[ColumnSpec, ...])
SPELLINGS_KNOWN: Final = 1024


class Specs:
    """Decodes the columns of puts; what was seen before costs a look."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[ColumnSpec, ...]] = {}

    def of(self, spelt: bytes) -> tuple[ColumnSpec, ...]:
        specs = self._known.get(spelt)
        if specs is None:
            if len(self._known) >= SPELLINGS_KNOWN:
                self._known.clear()
            specs = self._known[spelt] = _SPECS.decode(spelt)
        return specs


def value_of(op: Op, reply: Reply) -> object:
    """Return the value of a reply, or raise its error.

    Raises:
        OffbeatError: What the service raised instead, as its own class.
    """
    if reply.failure is not None:
        raise error_of(reply.failure)
    return _VALUES.get(type(op), _NOTHING).decode(reply.value)


_TYPED: Final = {
    name: kind
    for module in (failures, errors, queue_errors)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, OffbeatError)
}


def frames() -> FrameBuffer:
    """Return a buffer that refuses a frame longer than any of the service's with a ``ValueError``."""
    return FrameBuffer(_body_length)


def _body_length(header: bytes) -> int:
    length = body_length(header)
    if length > MOST_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; {MOST_FRAME_BYTES} are allowed")
    return length


def one_way(op: Op, unpinned: tuple[Slot, ...] = (), cancels: int | None = None) -> bytes:
    """The frame of a call that is not answered."""
    return framed(encode(WireCall(ONE_WAY, op, unpinned, cancels)))


def failure_of(error: Exception) -> Failure:
    """An error on its way to the client; what is not one of ours arrives as ``ServiceBug``."""
    kind = type(error).__name__
    if isinstance(error, OffbeatError) and kind in _TYPED:
        return Failure(kind, error.args)
    return Failure("ServiceBug", (kind, str(error)))


def error_of(failure: Failure) -> OffbeatError:
    """The error to raise in the client."""
    return _TYPED.get(failure.kind, ServiceBug)(*failure.fields)
