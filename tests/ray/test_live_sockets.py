"""Every listening socket of a run on one machine: at which address, what for, and who is answered."""

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import psutil

from tests.support.live_run import LiveRun
from tests.support.starting import ROOT, Start

RECIPE = ROOT / "recipes" / "deterministic.yaml"
TWO_RANKS = (
    *("steps=40", "groups_per_step=4", "samples_per_group=4", "trainer.data_parallel=2"),
    *("sync.transport=reshard", "sync.slack_s=15", "sync.deadline_s=100"),
)
OWN_SOCKETS = Counter(
    {
        # the first rank: the ranks' store and its gloo device; the weights' control channel, store
        # and gloo device
        ("ray::TorchTrainerActor", 5): 1,
        # the other rank: its gloo device; the weights' control channel, store and gloo device
        ("ray::TorchTrainerActor", 4): 1,
        ("ray::EmbeddedEngineActor", 1): 1,  # its gloo device of weight transfers
    }
)
"""Processes of a title with so many sockets that are offbeat's or gloo's, not Ray's."""


class Listening(NamedTuple):
    """A listening socket of a process of the run."""

    title: str
    pid: int
    address: str
    port: int

    @property
    def is_own(self) -> bool:
        """Ray's listen on sockets for both versions of IP, ours and gloo's on those for IPv4."""
        return "Actor" in self.title and not self.address.startswith("::ffff:")


def listening(run: LiveRun) -> Iterator[Listening]:
    """Every listening socket of the run's processes, once it trains and has sent weights."""
    run.trained_steps(3, within_s=450)  # two ranks that import torch
    for process in run.processes():
        title = process.cmdline()[0].partition(".")[0]  # a call that is served follows the class
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                yield Listening(title, process.pid, each.laddr.ip, each.laddr.port)


def test_a_run_on_one_machine_listens_on_loopback_only_and_strangers_do_not_disturb_it(
    start: Start,
) -> None:
    with start("sockets", RECIPE, *TWO_RANKS) as run, ExitStack() as strangers:
        sockets = [*listening(run)]
        places = {each.address.removeprefix("::ffff:") for each in sockets}
        assert places <= {"127.0.0.1", "::1"}, sockets
        own = [each for each in sockets if each.is_own]
        by_process = Counter((each.title, each.pid) for each in own)
        assert Counter((title, count) for (title, _), count in by_process.items()) == OWN_SOCKETS
        for each in own:
            for said in (b"", b"\x80\x04cposix\nsystem\n(Vtrue\ntR." * 8, b"\xff" * 4096):
                stranger = strangers.enter_context(
                    socket.create_connection(("127.0.0.1", each.port))
                )
                stranger.sendall(said)
        assert run.exit_code() == 0, run.err
        run.nothing_is_left()
