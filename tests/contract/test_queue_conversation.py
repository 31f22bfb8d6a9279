"""What a client does when the memory of a payload is gone: it says so to the queue, and to its caller."""

import gc
import socket
from contextlib import suppress

import pytest

from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.clients.protocol import REPORTED_AT_ONCE_BYTES, ClientProtocol
from offbeat.queue_service.core import records
from offbeat.queue_service.core.records import PutReceipt
from offbeat.queue_service.errors import QueuePayloadLost
from offbeat.queue_service.storage.arenas import Arena, ArenaAllocator, Slot
from offbeat.queue_service.wire import (
    Claim,
    Deliveries,
    Delivery,
    Piece,
    ReportLost,
    WirePayload,
)

NO_PROCESS = 1 << 30
RECEIPT = PutReceipt("train", "a", 2, 7, 4, 4096, {})


def delivered(say: ClientProtocol, payload: WirePayload, arenas: tuple[Arena, ...]) -> ClientLease:
    """A lease as the client holds it after this answer of the service."""
    claim = say.claim("train", "t", 1, None, (), (), 60.0, 0.0)
    assert isinstance(next(claim).op, Claim)
    parcels = Deliveries(((Piece(("ids",), 0, 4, payload),),), arenas)
    with pytest.raises(StopIteration) as end:
        claim.send(Delivery(records.Lease(1, "train", "t", (RECEIPT,), 60.0), parcels))
    lease = end.value.value
    assert isinstance(lease, ClientLease)
    return lease


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (WirePayload(b"", 4096, None, Slot(1, 0)), "its memory is gone"),
        (WirePayload(b"\x01rubbish", 3, b"abc"), ""),
    ],
)
def test_a_payload_that_cannot_be_read_is_reported_and_raised(
    payload: WirePayload, reason: str
) -> None:
    say = ClientProtocol()
    lease = delivered(say, payload, (Arena(1, NO_PROCESS, 3, 1 << 20),))
    get = say.get(lease, None)
    report = next(get).op
    assert isinstance(report, ReportLost)
    assert report.receipts == (RECEIPT,)
    assert reason in report.reason
    with pytest.raises(QueuePayloadLost, match="group a attempt 2"):
        get.send(None)


def test_memory_that_could_not_be_mapped_is_not_kept_from_others() -> None:
    say = ClientProtocol()
    delivered(say, WirePayload(b"", 4096, None, Slot(1, 0)), (Arena(1, NO_PROCESS, 3, 1 << 20),))
    assert say.unpinned() == (Slot(1, 0),)
    assert say.unpinned() == ()


def test_memory_that_the_service_could_not_be_told_of_at_once_is_told_with_the_next_call() -> None:
    say, keeper = ClientProtocol(), ArenaAllocator()
    nbytes = REPORTED_AT_ONCE_BYTES
    arena = keeper.make("client", nbytes)
    ours, busy = socket.socketpair()
    with ours, busy:
        ours.settimeout(0)
        with suppress(BlockingIOError):
            while True:
                ours.send(b"x")
        say.anchored(ours)
        delivered(say, WirePayload(b"", nbytes, None, Slot(arena.id, 0)), (arena,))
        gc.collect()  # the lease, and pytest's traceback that has it
        assert say.unpinned() == (Slot(arena.id, 0),)
        say.close()
    keeper.close()
