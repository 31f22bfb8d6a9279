"""The control channel of a sender: who is answered, and what happens to everybody else."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench_parts import HASTY, HOST, names, together
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_bench import ReshardBench, reshard_end, serves
from structlog.testing import capture_logs

from offbeat.plugins.reshard.control import ControlClient, ControlServer
from offbeat.plugins.reshard.messages import Join, Route
from offbeat.plugins.reshard.receiver import ReceivedBuckets
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.errors import SenderGone, TransferFailed
from offbeat.weight_sync.rendezvous.frames import SharedKey
from tests.support.weight_models import Model

KEY = SharedKey.random()
JOIN = Join("1.g0", 1, "g0", "incarnation", "digest", (0,), "plan")


@pytest.fixture
def bench() -> Iterator[ReshardBench]:
    made = ReshardBench(1)
    yield made
    made.close()


ENDS_AFTER_A_TRANSFER = """
from reshard_bench import ReshardBench, reshard_end
from tests.support.weight_models import Model

bench, engine = ReshardBench(1), reshard_end("g0", Model(2))
engine.take(bench.publish(1), 1)
bench.close()
"""


def test_a_process_may_end_while_the_connections_of_its_last_transfer_are_being_closed() -> None:
    here, root = Path(__file__).parent, Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AFTER_A_TRANSFER],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@settings(max_examples=30)
@given(st.binary(max_size=64))
def test_what_a_stranger_says_is_not_listened_to(said: bytes) -> None:
    server = ControlServer(HOST, KEY)
    with socket.create_connection((HOST, server.port)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert server.next(0.02) is None
    server.close()


class NoDescriptorLeft(socket.socket):
    """A listening socket whose next accepts fail, as in a process that has opened too many files."""

    failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def listening_badly(failures: int) -> Callable[[str], socket.socket]:
    def listen(host: str) -> socket.socket:
        listening = NoDescriptorLeft()
        listening.bind((host, 0))
        listening.listen()
        listening.settimeout(0.0)
        listening.failures = failures
        return listening

    return listen


def test_a_member_that_cannot_be_accepted_is_told_why_and_the_next_one_is_served() -> None:
    server = ControlServer(HOST, KEY, listen=listening_badly(1))
    route = Route(HOST, server.port, 0, KEY, "incarnation", 1, "digest", HASTY)
    with capture_logs() as told:
        turned_away = ControlClient(route, 1)
        turned_away.send(JOIN)
        assert server.next(0.02) is None
        answer = turned_away.answer(0, 5.0)
    assert answer.error == "the sender cannot accept: [Errno 24] Too many open files"
    assert [(each["event"], each["port"]) for each in told] == [
        ("weights.accept_failed", server.port)
    ]
    welcome = ControlClient(route, 1)
    welcome.send(JOIN)
    assert server.next(5.0) == JOIN
    for each in (turned_away, welcome, server):
        each.close()


def test_while_nobody_can_be_accepted_the_sender_neither_ends_nor_spins() -> None:
    pauses = list[float]()
    server = ControlServer(HOST, KEY, listen=listening_badly(4), pause=pauses.append)
    with socket.create_connection((HOST, server.port)):
        assert server.next(0.05) is None
    assert len(pauses) == 2  # each attempt fails twice: with and without the spare descriptor
    server.close()


class Unreadable(Mapping[int, BucketMemory]):
    """Buckets of a release that raise when they are looked up."""

    def __getitem__(self, bucket: int) -> BucketMemory:
        raise RuntimeError("a bug in the thread")

    def __contains__(self, bucket: object) -> bool:
        raise RuntimeError("a bug in the thread")

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_a_sender_whose_thread_has_ended_says_so_to_engines_and_to_the_trainer(
    bench: ReshardBench,
) -> None:
    published, (server,) = bench.publish(1), bench.servers
    offered = server.offered
    assert offered is not None
    server.offer(replace(offered, buckets=Unreadable()))
    engine = reshard_end("g0", Model(5))
    with capture_logs() as told:
        engine.take(published, 1)
        bench.close()
    assert isinstance(engine.outcome, SenderGone)
    assert "weights.server_ended" in [each["event"] for each in told]
    with pytest.raises(TransferFailed, match="has ended: RuntimeError: a bug in the thread"):
        bench.publish(2)


def test_a_sender_that_was_closed_is_gone_at_once(bench: ReshardBench) -> None:
    published = bench.publish(1)
    bench.close()
    bench.close()
    engine = reshard_end("g0", Model(5))
    engine.take(published, 1)
    assert isinstance(engine.outcome, SenderGone)
    assert "is gone" in str(engine.outcome)


def test_a_member_with_another_key_is_not_listened_to(bench: ReshardBench) -> None:
    published = bench.publish(1)
    (route,) = published.handles
    foreign = msgspec.structs.replace(route.senders[0], key=SharedKey.random())
    changed = msgspec.structs.replace(route, senders=(foreign,))
    model = Model(5)
    engine = reshard_end("g0", model)
    engine.take(published._replace(handles=(changed,)), 1)
    assert isinstance(engine.outcome, TransferFailed)
    assert "is gone" in str(engine.outcome)
    engine.take(published, 2)
    assert serves(model, bench)


def test_strangers_hold_a_bounded_number_of_connections_and_keep_no_member_out(
    bench: ReshardBench,
) -> None:
    published = bench.publish(1)
    (route,) = published.handles
    (rank,) = route.senders
    ports = [rank.port] * 100 + [rank.store_port] * 100
    strangers = [socket.create_connection((HOST, port)) for port in ports]
    models = [Model(5), Model(6)]
    engines = [reshard_end(name, model) for name, model in zip(names(2), models, strict=True)]
    together(*(lambda each=each: each.take(published, 1) for each in engines))
    assert all(isinstance(each.outcome, ReceivedBuckets) for each in engines)
    assert all(serves(model, bench) for model in models)
    for each in strangers:
        each.close()
