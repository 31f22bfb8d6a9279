"""Connections of strangers that reach a rank's port before the engine does."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import psutil
import pytest
import torch
from bench_parts import HASTY, HOST, PATIENT

from offbeat.weight_sync.rendezvous.frames import SharedKey
from offbeat.weight_sync.rendezvous.store_server import StoreServer
from offbeat.weight_sync.transports.group import BrokenLink, meet
from offbeat.weight_sync.transports.group_wire import tcp_wire
from offbeat.weight_sync.transports.handle_wire import HandleWire
from offbeat.weight_sync.transports.messages import Route, TransferTimeouts
from offbeat.weight_sync.transports.peer_proof import PeerProof, accept_peer
from offbeat.weight_sync.transports.wire import BucketLink, BucketWire
from tests.support.wire_doubles import SharedMemory

PLAN_DIGEST = "digest of the plan"
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
        place = meet(self.route, "session", 0, PLAN_DIGEST)
        try:
            self.outcome = self.wire.link(place, self.route, HOST)
        except BrokenLink as broken:
            self.outcome = broken

    def engine(self, plan_digest: str = PLAN_DIGEST) -> BucketLink:
        place = meet(self.route, "session", 1, plan_digest)
        return self.wire.link(place, self.route, HOST)

    def carry(self, data: torch.Tensor, into: torch.Tensor, engine: BucketLink) -> None:
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

    def port(self) -> int:
        """The port of handles; strangers find it without the store."""
        place = meet(self.route, "session", 1)
        return int(msgspec.json.decode(place.store.get("handles"))["port"])

    def close(self) -> None:
        self.sending.join(20.0)
        self.store.close()


@pytest.fixture
def handles() -> Iterator[Ends]:
    made = Ends(HandleWire("cuda_ipc", SharedMemory()))
    made.sending.start()
    yield made
    made.close()


def stranger(port: int, said: bytes = b"") -> socket.socket:
    connection = socket.create_connection((HOST, port), timeout=20.0)
    connection.sendall(said)
    return connection


def proof(key: SharedKey, token: bytes = bytes(32), plan_digest: str = PLAN_DIGEST) -> bytes:
    return key.frame(msgspec.msgpack.encode(PeerProof(token, plan_digest)))


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_strangers_that_come_first_cost_an_engine_nothing(handles: Ends) -> None:
    port = handles.port()
    others = [
        stranger(port, said)
        for said in (
            SILENT,
            SCAN,
            GARBAGE,
            ZEROS,
            proof(SharedKey.random()),  # of another run
            proof(handles.key),  # of another link of this run
            handles.key.frame(b"no proof"),
        )
    ]
    assert all(map(is_closed, others[1:])), "all but the silent one have said who they are not"
    engine = handles.engine()
    data, into = handles.wire.memory_to_send(64), handles.wire.memory_to_receive(64)
    assert isinstance(data, torch.Tensor)
    assert isinstance(into, torch.Tensor)
    handles.carry(data.fill_(7), into.fill_(0), engine)
    assert into.eq(7).all()
    assert is_closed(others[0]), "nobody waits for it any more"
    for each in others:
        each.close()


def test_a_port_scan_that_goes_on_pushes_no_engine_out(handles: Ends) -> None:
    port = handles.port()
    others = [stranger(port) for _ in range(70)]
    assert all(map(is_closed, others[:6])), "the oldest of more than are kept"
    engine = handles.engine()
    handles.sending.join(20.0)
    assert handles.outcome is not None
    assert not isinstance(handles.outcome, BrokenLink)
    for each in (engine, handles.outcome):
        each.close()
    for each in others:
        each.close()


def test_an_engine_of_another_plan_is_a_stranger() -> None:
    ends = Ends(HandleWire("cuda_ipc", SharedMemory()), HASTY)
    ends.sending.start()
    engine = ends.engine("digest of another plan")
    engine.receive(ends.wire.memory_to_receive(64), 0)
    with pytest.raises(BrokenLink, match="has closed"):
        engine.wait(20.0)
    ends.close()
    assert "has not connected within 1 s; 1 others did" in str(ends.outcome)
    engine.close()


def test_who_proves_nothing_in_time_ends_the_wait_with_a_count() -> None:
    with socket.create_server((HOST, 0)) as listening:
        silent = stranger(listening.getsockname()[1])
        with pytest.raises(BrokenLink, match=r"within 0\.2 s; 1 others did"):
            accept_peer(listening, SharedKey.random(), PeerProof.fresh(""), 0.2)
        assert is_closed(silent)
        silent.close()


def test_a_proof_is_compared_by_token_and_by_plan_and_shows_no_token() -> None:
    ours = PeerProof.fresh("plan")
    assert ours.problem(PeerProof(ours.token, "plan")) == ""
    assert "token of another link" in PeerProof.fresh("plan").problem(ours)
    assert "another plan: other, not plan" in PeerProof(ours.token, "other").problem(ours)
    assert repr(ours) == "PeerProof(plan_digest='plan')"


def test_an_end_that_says_more_than_its_proof_is_no_peer_whose_words_would_be_lost() -> None:
    key, expected = SharedKey.random(), PeerProof.fresh("plan")
    with socket.create_server((HOST, 0)) as listening:
        said = key.frame(msgspec.msgpack.encode(expected))
        talker = stranger(listening.getsockname()[1], said + said)
        with pytest.raises(BrokenLink, match="1 others did"):
            accept_peer(listening, key, expected, 0.2)
        assert is_closed(talker)
        talker.close()


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("said", [SILENT, SCAN, GARBAGE, ZEROS])
def test_gloo_lets_no_stranger_take_the_place_of_an_engine(said: bytes) -> None:
    ends = Ends(tcp_wire())
    place = meet(ends.route, "session", 1)
    before = listening_ports()
    ends.sending.start()
    place.store.wait(["0/0"])  # where the sender has left its address
    others = [stranger(port, said) for port in listening_ports() - before]
    assert others
    engine = ends.engine()
    data, into = torch.full((64,), 7, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    ends.carry(data, into, engine)
    assert into.eq(7).all()
    for each in others:
        each.close()
    ends.close()
