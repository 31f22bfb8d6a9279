"""Groups of two whose other rank is lost between the rendezvous and the first message."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from bench_parts import HASTY, HOST, together

from offbeat.plugins.reshard.eager_groups import EagerGroups, call_within
from offbeat.plugins.reshard.group import (
    BrokenLink,
    GroupAddress,
    PairGroup,
    meet,
    open_connection,
)
from offbeat.plugins.reshard.messages import Route
from offbeat.weight_sync.rendezvous.frames import SharedKey
from offbeat.weight_sync.rendezvous.store_server import StoreServer
from tests.support.wire_doubles import LazyGloo, eager_gloo

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0  # of the test; the stand-in would wait for an hour


class Struck(LazyGloo):
    """Both ranks are there; then this one does no more, with or without a group of its own."""

    def __init__(self, sign: int, *, has_group: bool) -> None:
        super().__init__(HOST)
        self._sign, self._has_group = sign, has_group

    def group(self, place: GroupAddress) -> Any:
        made = super().group(place) if self._has_group else None
        os.kill(os.getpid(), self._sign)
        return made


def lost_peer(route: Route, rank: int, sign: int, has_group: bool) -> None:
    place = meet(route, "session", rank)
    EagerGroups(Struck(sign, has_group=has_group), PATIENCE_S).group(place)


@pytest.fixture
def store() -> Iterator[Route]:
    """Where both ranks meet."""
    key = SharedKey.random()
    made = StoreServer(HOST, key)
    yield Route(HOST, 0, made.port, key, "rank-0", 0, "", HASTY)
    made.close()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("survivor", "has_group"), [(0, True), (1, False)])
def test_a_peer_that_is_lost_before_the_first_message_is_an_error_and_the_process_can_end(
    processes: ForkServerContext, store: Route, sign: int, survivor: int, has_group: bool
) -> None:
    peer = processes.Process(
        target=lost_peer, args=(store, 1 - survivor, sign, has_group), daemon=True
    )
    peer.start()
    route = msgspec.msgpack.encode(store).hex()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.plugins.reshard.link_survivor", route, str(survivor)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
    finally:
        peer.kill()
        peer.join()
    assert ended.stdout.startswith("BrokenLink: ")
    if sign == signal.SIGSTOP or not has_group:  # of a killed one, gloo may see its connection end
        assert f"forming a group with rank {1 - survivor} has not ended after 1 s" in ended.stdout


def test_two_ranks_that_are_there_form_a_group_that_carries_messages(store: Route) -> None:
    got = dict[int, torch.Tensor]()

    def rank(number: int) -> None:
        pair = PairGroup(meet(store, "session", number), eager_gloo(HOST, PATIENCE_S))
        data = torch.full((9,), 7 - 7 * number, dtype=torch.uint8)
        (pair.receive if number else pair.send)(data, 0)
        got[number] = torch.as_tensor(pair.wait(PATIENCE_S))
        pair.finish(PATIENCE_S)
        pair.close()

    together(partial(rank, 0), partial(rank, 1))
    assert got[1].eq(7).all()


class Hanging(LazyGloo):
    """A library that neither closes nor aborts a group."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.asked, self.go = list[str](), threading.Event()

    def close(self, group: object) -> None:
        self.asked.append("close")
        self.go.wait(PATIENCE_S)

    def abort(self, group: object) -> None:
        self.asked.append("abort")
        self.go.wait(PATIENCE_S)


def test_a_group_that_cannot_be_closed_is_aborted_and_left_behind() -> None:
    library = Hanging()
    groups = EagerGroups(library, 0.01)
    groups.close(object())
    assert library.asked == ["close", "abort"]
    groups.abort(object())
    library.go.set()


def test_a_peer_that_never_comes_is_an_error_after_the_limit(store: Route) -> None:
    place = meet(store, "session", 0)
    with (
        pytest.raises(BrokenLink),
        open_connection(lambda: PairGroup(place, eager_gloo(HOST, 0.2))),
    ):
        pass


class Unformed(LazyGloo):
    """A library whose first message fails, or waits for an address that nobody leaves."""

    def __init__(self, place: GroupAddress, *, fails: bool) -> None:
        super().__init__(HOST)
        self._place, self._fails, self.aborted = place, fails, 0

    def group(self, place: GroupAddress) -> Any:
        del place
        return self

    def send(self, *about: object) -> Any:
        del about
        if self._fails:
            raise RuntimeError("no device")
        self._place.store.wait(["address"], timedelta(seconds=PATIENCE_S))

    def abort(self, group: object) -> None:
        assert group is self
        self.aborted += 1


@pytest.mark.parametrize(("fails", "why"), [(True, "no device"), (False, "has not ended after")])
def test_a_group_that_is_not_formed_is_aborted_and_leaves_no_thread_at_the_store(
    store: Route, *, fails: bool, why: str
) -> None:
    place = meet(store, "session", 0)
    place.store.set("ready/1", "1")
    library = Unformed(place, fails=fails)
    with pytest.raises((BrokenLink, RuntimeError), match=why):
        EagerGroups(library, 0.2).group(place)
    assert library.aborted
    assert not [each for each in threading.enumerate() if each.name.startswith("forming")]


def test_a_call_within_its_limit_is_as_if_it_had_been_made_directly() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    assert call_within(PATIENCE_S, lambda: 3, what="adding", give_up=fail) == 3
    with pytest.raises(TimeoutError, match="its own"):
        call_within(PATIENCE_S, fail, what="adding", give_up=lambda: None)


def test_a_call_beyond_its_limit_is_asked_to_give_up() -> None:
    go = threading.Event()
    with pytest.raises(BrokenLink, match=r"waiting has not ended after 0\.01 s"):
        call_within(0.01, lambda: go.wait(PATIENCE_S), what="waiting", give_up=go.set)
    assert go.is_set()


def test_what_gives_up_has_ended_when_a_late_call_is_an_error() -> None:
    stopped, ended = threading.Event(), threading.Event()

    def give_up() -> None:
        stopped.set()
        late.join()
        ended.set()

    def call() -> None:
        nonlocal late
        late = threading.current_thread()
        stopped.wait(PATIENCE_S)

    late = threading.main_thread()
    with pytest.raises(BrokenLink, match="adding has not ended after"):
        call_within(0.01, call, what="adding", give_up=give_up)
    assert ended.is_set()
