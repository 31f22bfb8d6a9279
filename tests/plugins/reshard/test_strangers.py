"""Connections of strangers that reach a rank's port before the engine does."""

import socket
import threading
from dataclasses import dataclass, field

import psutil
import pytest
from bench_parts import HOST, PATIENT

from offbeat.plugins.reshard.group import BrokenLink, meet
from offbeat.plugins.reshard.messages import Route, TransferTimeouts
from offbeat.plugins.reshard.wire import BucketLink, BucketWire
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.rendezvous.frames import SharedKey
from offbeat.weight_sync.rendezvous.store_server import StoreServer
from tests.support.wire_doubles import doubled

SILENT, SCAN, GARBAGE, ZEROS = b"", b"GET / HTTP/1.1\r\n\r\n" * 4, b"\xff" * 64, bytes(64)


@dataclass
class Ends:
    """Both ends of a link; the sender waits in a thread while strangers come."""

    wire: BucketWire
    timeouts: TransferTimeouts = PATIENT
    key: SharedKey = field(default_factory=SharedKey.random)
    outcome: BucketLink | BrokenLink | None = None

    def __post_init__(self) -> None:
        self.store = StoreServer(HOST, self.key)
        self.route = Route(HOST, 0, self.store.port, self.key, "rank-0", 0, "", self.timeouts)
        self.sending = threading.Thread(target=self._send)

    def _send(self) -> None:
        place = meet(self.route, "session", 0)
        try:
            self.outcome = self.wire.link(place, self.route, HOST)
        except BrokenLink as broken:
            self.outcome = broken

    def engine(self) -> BucketLink:
        place = meet(self.route, "session", 1)
        return self.wire.link(place, self.route, HOST)

    def carry(self, data: BucketMemory, into: BucketMemory, engine: BucketLink) -> None:
        """Send a bucket over the link."""
        self.sending.join(20.0)
        assert self.outcome is not None
        assert not isinstance(self.outcome, BrokenLink), self.outcome
        self.outcome.send(data, 0)
        engine.receive(into, 0)
        engine.wait(20.0)
        self.outcome.wait(20.0)
        for each in (engine, self.outcome):
            each.close()

    def close(self) -> None:
        self.sending.join(20.0)
        self.store.close()


def stranger(port: int, said: bytes = b"") -> socket.socket:
    connection = socket.create_connection((HOST, port), timeout=20.0)
    connection.sendall(said)
    return connection


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("wire", ["tcp", "cuda_ipc"])
@pytest.mark.parametrize("said", [SILENT, SCAN, GARBAGE, ZEROS])
def test_gloo_lets_no_stranger_take_the_place_of_an_engine(wire: str, said: bytes) -> None:
    ends = Ends(doubled(wire, ""))
    place = meet(ends.route, "session", 1)
    before = listening_ports()
    ends.sending.start()
    place.store.wait(["0/0"])  # where the sender has left its address
    others = [stranger(port, said) for port in listening_ports() - before for _ in range(9)]
    assert others
    engine = ends.engine()
    data, into = ends.wire.memory_to_send(64), ends.wire.memory_to_receive(64)
    data[:], into[:] = 7, 0
    ends.carry(data, into, engine)
    assert (into == 7).all()
    for each in others:
        each.close()
    ends.close()
