"""Messages between clients and the service, in msgpack, which cannot carry code.

A frame is its length (4 bytes, little-endian) and a body: a ``WireCall`` to the service, a
``Reply`` from it. A client numbers its calls; replies may come in any order.
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
"""Maximum length of a frame; a longer one closes the connection."""


class WirePayload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Columns of a group: the header of a ``Block``, and its memory, inline or in a slot."""

    header: bytes
    nbytes: int
    inline: bytes | None = None
    slot: Slot | None = None


class _Op(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of the operations that a client requests."""


class Attach(_Op, frozen=True):
    """First call on every connection. Without a name, a new one is issued; reply: the name.

    A client ends with its last connection. ``maps`` states whether it shares memory with the
    service; else payloads are sent to it inside the replies.
    """

    client: str | None
    maps: bool


class Probe(_Op, frozen=True):
    """Request that tests whether client and service share memory.

    Reply: an ``Arena`` that holds the socket's path for the client to read.
    """


class Leave(_Op, frozen=True):
    """End of a client: its leases end, its views stay valid. Reply: None."""


class Declare(_Op, frozen=True):
    """Create a partition. Reply: None."""

    partition: str
    schema: Schema


class Borrow(_Op, frozen=True):
    """Borrow another arena to write to, of at least ``nbytes``. Reply: ``Arena``."""

    nbytes: int


class Put(_Op, frozen=True):
    """Put a group; its slot belongs to the service from here on, even on errors. Reply: receipt."""

    partition: str
    group: str
    attempt: int
    rows: int
    columns: bytes  # encoded list of ``ColumnSpec``, decoded once per distinct value
    tags: Tags
    nbytes: int
    payload: WirePayload
    wait_s: float


class AddColumns(_Op, frozen=True):
    """Add columns to a group, for rows ``[start, stop)``. Reply: its receipt, with the new size."""

    receipt: PutReceipt
    columns: bytes
    start: int
    stop: int
    nbytes: int
    payload: WirePayload


class Claim(_Op, frozen=True):
    """Lease ``n`` groups for a task, or fewer from ``at_least`` on, at once or within ``wait_s``.

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
    """Ack a lease; with ``clear``, clear its groups too. Reply: None."""

    lease: int
    clear: bool


class Release(_Op, frozen=True):
    """Release a lease: its groups are delivered again. Reply: None."""

    lease: int


class Renew(_Op, frozen=True):
    """Extend a lease to ``lease_s`` from now. Reply: Lease."""

    lease: int
    lease_s: float


class Locate(_Op, frozen=True):
    """Return the payloads of groups that this client did not claim. Reply: ``Deliveries``."""

    receipts: tuple[PutReceipt, ...]


class Clear(_Op, frozen=True):
    """Remove groups. Reply: how many were in the queue."""

    receipts: tuple[PutReceipt, ...]


class ClearPartition(_Op, frozen=True):
    """Remove all groups of a partition. Reply: how many there were."""

    partition: str


class ReportLost(_Op, frozen=True):
    """Report payloads that could not be read. Reply: None."""

    receipts: tuple[PutReceipt, ...]
    reason: str


class TakeLost(_Op, frozen=True):
    """Return lost groups, each once. Reply: list of ``LostGroup``."""

    partition: str


class GetStats(_Op, frozen=True):
    """Return statistics. Reply: ``ServiceStats``."""


class SaveTo(_Op, frozen=True):
    """Write a snapshot to a directory. Reply: number of payloads written."""

    directory: str


class Nothing(_Op, frozen=True):
    """Carry unpinned slots only. Reply: None."""


Op = (
    Attach | Probe | Leave | Declare | Borrow | Put | AddColumns | Claim | Ack | Release | Renew | Locate | Clear
    | ClearPartition | ReportLost | TakeLost | GetStats | SaveTo | Nothing
)  # fmt: skip


ONE_WAY: Final = 0


class WireCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request. ``unpinned`` lists slots that lost a view in this client, one entry per view.

    A call with ``cancels`` ends the waiting call of that id, which is answered with None at once. A
    call of id ``ONE_WAY`` is not answered.
    """

    id: int
    op: Op
    unpinned: tuple[Slot, ...] = ()
    cancels: int | None = None


class WireFailure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A typed error as its class name and its fields."""

    kind: str
    fields: tuple[str | int | float | tuple[Any, ...] | None, ...]  # a sequence arrives as a tuple


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reply to the call of this id. ``freed`` lists slots that the client may write to again."""

    id: int
    value: msgspec.Raw
    failure: WireFailure | None = None
    freed: tuple[Slot, ...] = ()


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One payload of a group: its columns, for rows ``[start, stop)``."""

    columns: tuple[str, ...]
    start: int
    stop: int
    payload: WirePayload


class Deliveries(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Payloads group by group, oldest first, and the arenas of their slots."""

    groups: tuple[tuple[Piece, ...], ...]
    arenas: tuple[Arena, ...]


def slots_of(deliveries: Deliveries) -> tuple[Slot, ...]:
    """Return the slots of these payloads, one entry per payload."""
    return tuple(
        piece.payload.slot
        for group in deliveries.groups
        for piece in group
        if piece.payload.slot is not None
    )


class Delivery(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A lease, and the payloads to read its groups from."""

    lease: Lease
    payloads: Deliveries


class ServiceStats(msgspec.Struct, frozen=True):
    """Statistics of the queue and of the service around it."""

    queue: Stats
    clients: int
    arena_bytes: int  # bytes of payloads in shared memory, stored or still viewed by a reader
    calls: int  # calls answered since the start
    waited_s: dict[str, float]  # seconds that calls waited, by kind of call
    wakes: int  # waiting calls that were served
    # Seconds from the change that served a waiting call, such as a put, to its reply
    wake_p99_s: float


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
    """Decodes the columns of puts, with a cache of values seen before."""

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
        OffbeatError: The error that the service raised, as its own class.
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
    """Return the frame of a call that is not answered."""
    return framed(encode(WireCall(ONE_WAY, op, unpinned, cancels)))


def failure_of(error: Exception) -> WireFailure:
    """Encode an error for the client.

    An exception that is not ``OffbeatError`` becomes ``ServiceBug``.
    """
    kind = type(error).__name__
    if isinstance(error, OffbeatError) and kind in _TYPED:
        return WireFailure(kind, error.args)
    return WireFailure("ServiceBug", (kind, str(error)))


def error_of(failure: WireFailure) -> OffbeatError:
    """Decode the error to raise in the client."""
    return _TYPED.get(failure.kind, ServiceBug)(*failure.fields)
