"""The gloo broadcast over real connections, its ends in threads of one process."""

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from broadcast_bench import (
    CHUNK_BYTES,
    HASTY,
    HOST,
    PATIENT,
    Bench,
    End,
    end,
    flipped,
    names,
    together,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from weight_models import Model, equal, weights

from offbeat.rendezvous.frames import SharedKey
from offbeat.weight_sync.errors import SenderGone, TransferFailed, TransferRefused
from offbeat.weight_sync.manifest import Bytes
from offbeat.weight_sync.source import ModuleSource
from offbeat.weight_sync.transport import PublishedRelease
from offbeat.weight_sync.transports.control import ControlClient, ControlServer
from offbeat.weight_sync.transports.gloo_receiver import Received
from offbeat.weight_sync.transports.gloo_sender import GlooSender
from offbeat.weight_sync.transports.messages import Join, MemberGone, Route

KEY = SharedKey.random()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.sender.close()


@pytest.fixture
def hasty() -> Iterator[Bench]:
    made = Bench(timeouts=HASTY)
    yield made
    made.sender.close()


def ends(count: int) -> tuple[list[Model], list[End]]:
    models = [Model(10 + index) for index in range(count)]
    return models, [end(name, model) for name, model in zip(names(count), models, strict=True)]


def sync(published: PublishedRelease, epoch: int, receivers: list[End]) -> None:
    members = tuple(each.name for each in receivers)
    together(*(partial(each.take, published, epoch, members) for each in receivers))


def heals(models: list[Model], receivers: list[End]) -> None:
    """Whatever came of earlier ones, a whole transfer of a patient sender is exact."""
    healthy = Bench(seed=7)
    sync(healthy.sender.publish(9), 99, receivers)
    healthy.sender.close()
    assert all(equal(weights(model), weights(healthy.model)) for model in models)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_engine_gets_every_byte(bench: Bench, count: int) -> None:
    models, receivers = ends(count)
    for epoch in (1, 2):
        sync(bench.sender.publish(epoch), epoch, receivers)
        assert all(equal(weights(model), weights(bench.model)) for model in models)
        assert [each.outcome for each in receivers] == [Received(bench.count, 1)] * count
        bench.model.embed.weight.data += 1


def test_a_release_is_a_snapshot(bench: Bench) -> None:
    published, before = bench.sender.publish(1), weights(bench.model)
    bench.model.embed.weight.data += 1
    (model,), receivers = ends(1)
    sync(published, 1, receivers)
    assert equal(weights(model), before)


def test_the_engine_that_comes_later_takes_the_same_release(bench: Bench) -> None:
    models, (first, second) = ends(2)
    published = bench.sender.publish(1)
    sync(published, 1, [first])
    sync(published, 2, [second])
    assert equal(weights(models[0]), weights(models[1]))


def test_at_every_chunk_a_sender_that_raises_ends_it_for_all_and_says_where(bench: Bench) -> None:
    models, receivers = ends(2)
    before = [weights(model) for model in models]
    for epoch in range(1, bench.count + 1):

        def strike(index: int, at: int = epoch - 1) -> None:
            if index == at:
                raise OSError("disk on fire")

        sync(bench.struck(strike), epoch, receivers)
        for each in receivers:
            assert isinstance(each.outcome, TransferFailed)
            said = str(each.outcome)
            assert f"rank 0 failed at chunk {epoch - 1} (" in said
            assert "disk on fire" in said
    assert all(map(equal, map(weights, models), before)), "each serves what it served"
    heals(models, receivers)


def test_at_every_chunk_a_receiver_that_raises_is_left_and_the_others_get_all(bench: Bench) -> None:
    models, receivers = ends(3)
    published = bench.sender.publish(1)
    for epoch in range(1, bench.count + 1):
        bad, *good = receivers

        def sink(index: int, data: Bytes, at: int = epoch - 1, bad: End = bad) -> None:
            if index == at:
                raise ValueError("out of memory")
            bad.receiver.apply(at + 1, index, data)

        together(
            partial(bad.take, published, epoch, names(3), sink),
            *(partial(each.take, published, epoch, names(3)) for each in good),
        )
        assert isinstance(bad.outcome, ValueError)
        for each in good:
            assert isinstance(each.outcome, Received), each.outcome
            assert each.outcome.at == bench.count
    assert [equal(weights(m), weights(bench.model)) for m in models] == [False, True, True]
    heals(models, receivers)


def test_a_chunk_that_is_not_what_was_packed_is_found_when_it_comes(bench: Bench) -> None:
    models, receivers = ends(2)
    before = [weights(model) for model in models]
    published = bench.sender.publish(1)
    snapshot = bench.sender.snapshot
    assert snapshot is not None
    chunks = list(snapshot.chunks)
    chunks[1] = flipped(chunks[1])
    bench.sender.snapshot = type(snapshot)(snapshot.manifest, snapshot.digest, chunks)
    sync(published, 1, receivers)
    for each in receivers:
        assert isinstance(each.outcome, TransferRefused)
        assert "digest of chunk 1 (" in str(each.outcome)
    assert all(map(equal, map(weights, models), before))
    heals(models, receivers)


def test_an_engine_that_does_not_come_holds_nobody_up_beyond_the_slack(hasty: Bench) -> None:
    models, (first, absent) = ends(2)
    published = hasty.sender.publish(1)
    first.take(published, 1, names(2))
    assert isinstance(first.outcome, Received)
    assert equal(weights(models[0]), weights(hasty.model))
    heals(models, [first, absent])


def test_an_engine_that_hangs_is_left_and_the_others_get_all(hasty: Bench) -> None:
    models, (wedged, good) = ends(2)
    published, free = hasty.sender.publish(1), threading.Event()

    def sink(index: int, _: Bytes) -> None:
        if index == 1:
            free.wait(60)

    def take_and_free() -> None:
        good.take(published, 1, names(2))
        free.set()

    together(partial(wedged.take, published, 1, names(2), sink), take_and_free)
    assert isinstance(good.outcome, Received), good.outcome
    assert isinstance(wedged.outcome, TransferFailed)
    assert [equal(weights(m), weights(hasty.model)) for m in models] == [False, True]
    heals(models, [wedged, good])


def test_a_newer_release_has_taken_the_place_of_the_one_asked_for(bench: Bench) -> None:
    models, receivers = ends(2)
    old = bench.sender.publish(1)
    bench.model.embed.weight.data += 1
    new = bench.sender.publish(2)
    sync(old, 1, receivers)
    for each in receivers:
        assert isinstance(each.outcome, SenderGone), "the engine is not at fault"
        assert f"another release by now: {new.digest}, not {old.digest}" in str(each.outcome)
    sync(new, 2, receivers)
    assert all(isinstance(each.outcome, Received) for each in receivers)
    assert all(equal(weights(model), weights(bench.model)) for model in models)


def test_a_route_of_another_process_incarnation_leads_nowhere(bench: Bench) -> None:
    models, receivers = ends(1)
    manifest, digest, (route,), *_ = bench.sender.publish(1)
    former = msgspec.structs.replace(route, incarnation="incarnation-0")
    sync(PublishedRelease(manifest, digest, (former,)), 1, receivers)
    assert "incarnation-0 is gone; incarnation-1 has taken its place" in str(receivers[0].outcome)
    heals(models, receivers)


def test_a_sender_that_was_closed_is_told_at_once() -> None:
    bench = Bench()
    published = bench.sender.publish(1)
    bench.sender.close()
    bench.sender.close()
    models, receivers = ends(1)
    sync(published, 1, receivers)
    assert isinstance(receivers[0].outcome, SenderGone)
    assert "is gone" in str(receivers[0].outcome)
    heals(models, receivers)


def test_a_transfer_that_nobody_waits_for_any_more_stops_at_the_next_chunk(bench: Bench) -> None:
    (model,), (only,) = ends(1)
    before, given_up = weights(model), threading.Event()

    def sink(index: int, data: Bytes) -> None:
        given_up.set()
        only.receiver.apply(1, index, data)

    only.take(bench.sender.publish(1), 1, names(1), sink, given_up)
    assert isinstance(only.outcome, TransferFailed)
    assert only.outcome.at == 1
    assert equal(weights(model), before)
    heals([model], [only])


ENDS_AFTER_A_TRANSFER = """
from broadcast_bench import Bench, end
from weight_models import Model

bench, engine = Bench(), end("g0", Model(2))
engine.take(bench.sender.publish(1), 1, ("g0",))
bench.sender.close()
"""


def test_a_process_may_end_while_the_connections_of_its_last_transfer_are_being_closed() -> None:
    program = [sys.executable, "-c", ENDS_AFTER_A_TRANSFER]
    ended = subprocess.run(program, cwd=Path(__file__).parent, capture_output=True, check=False)
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
    join = Join("1.g0", 1, ("g0",), "g0", "incarnation", "digest")
    with capture_logs() as told:
        turned_away = ControlClient(route, 1)
        turned_away.send(join)
        assert server.next(0.02) is None
        plan = turned_away.plan(0, 5.0)
    assert plan.error == "the sender cannot accept: [Errno 24] Too many open files"
    assert [(each["event"], each["port"]) for each in told] == [
        ("weights.accept_failed", server.port)
    ]
    welcome = ControlClient(route, 1)
    welcome.send(join)
    assert server.next(5.0) == join
    for each in (turned_away, welcome, server):
        each.close()


def test_a_member_whose_connection_ends_is_reported_with_its_session() -> None:
    server = ControlServer(HOST, KEY)
    route = Route(HOST, server.port, 0, KEY, "incarnation", 1, "digest", HASTY)
    join = Join("1.g0", 1, ("g0",), "g0", "incarnation", "digest")
    member, stranger = ControlClient(route, 1), ControlClient(route, 1)
    stranger.close()
    member.send(join)
    assert server.next(5.0) == join
    member.close()
    assert server.next(5.0) == MemberGone("1.g0", "g0")
    assert server.next(0.02) is None, "one that never joined is nobody's member"
    server.close()


def test_while_nobody_can_be_accepted_the_sender_neither_ends_nor_spins() -> None:
    pauses = list[float]()
    server = ControlServer(HOST, KEY, listen=listening_badly(4), pause=pauses.append)
    with socket.create_connection((HOST, server.port)):
        assert server.next(0.05) is None
    assert len(pauses) == 2  # each attempt fails twice: with and without the spare descriptor
    server.close()


def test_a_sender_whose_thread_has_ended_says_so_to_engines_and_to_the_trainer() -> None:
    def broken_clock() -> float:
        raise RuntimeError("a bug in the thread")

    source = ModuleSource(Model(1), CHUNK_BYTES)
    sender = GlooSender(
        source, host=HOST, incarnation="incarnation-1", timeouts=PATIENT, clock=broken_clock
    )
    published = sender.publish(1)
    models, receivers = ends(1)
    with capture_logs() as told:
        sync(published, 1, receivers)
        sender.close()
    assert isinstance(receivers[0].outcome, TransferFailed)
    assert "is gone" in str(receivers[0].outcome)
    assert "weights.sender_ended" in [each["event"] for each in told]
    with pytest.raises(TransferFailed, match="has ended: RuntimeError: a bug in the thread"):
        sender.publish(2)
    heals(models, receivers)


def test_a_member_with_another_key_is_not_listened_to(bench: Bench) -> None:
    (model,), (receiver,) = ends(1)
    published = bench.sender.publish(1)
    (route,) = published.handles
    foreign = msgspec.structs.replace(route, key=SharedKey.random())
    receiver.take(published._replace(handles=(foreign,)), 1, names(1))
    assert isinstance(receiver.outcome, TransferFailed)
    assert "is gone" in str(receiver.outcome)
    heals([model], [receiver])


def test_strangers_hold_a_bounded_number_of_connections_and_keep_no_member_out(
    bench: Bench,
) -> None:
    published = bench.sender.publish(1)
    (route,) = published.handles
    ports = [route.port] * 100 + [route.store_port] * 100
    strangers = [socket.create_connection((HOST, port)) for port in ports]
    models, receivers = ends(2)
    sync(published, 1, receivers)
    assert all(equal(weights(model), weights(bench.model)) for model in models)
    for each in strangers:
        each.close()
