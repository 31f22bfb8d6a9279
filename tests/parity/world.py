"""Processes that are kept for a whole pytest run, and are a world of 1, 2 or 4 ranks when asked.

A job is a function of an importable module, ``"torch_jobs:split"``; every rank of the world calls it
with the world's peers and the same arguments.
"""

import gc
import importlib
import multiprocessing
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from offbeat.trainers.spec import WorldRendezvous
from offbeat.weight_sync.rendezvous.frames import SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.store_server import StoreServer

RANKS = 4
HOST = "127.0.0.1"
DEADLINE_S = 110.0
COLLECTIVE_S = 40.0


class WorkerFailed(Exception):
    """A job raised; the text is its traceback."""


class World:
    """Worker processes; they start when they are first needed."""

    def __init__(self) -> None:
        self.deadline_s = DEADLINE_S  # of an answer
        self._key = SharedKey.random()
        self._server = StoreServer(HOST, self._key)
        self._jobs = self._tasks = 0
        self._workers = list[tuple[Any, Connection]]()

    def run(self, ranks: int, job: str, **arguments: Any) -> list[Any]:
        """The job's answer on every rank.

        Raises:
            WorkerFailed: It raised on a rank, or a rank gave no answer; the others were waited for.
        """
        self._jobs += 1
        while len(self._workers) < ranks:
            self._start(len(self._workers))
        at = WorldRendezvous(
            f"job-{self._jobs}",
            StoreAddress(HOST, self._server.port, self._key),
            ranks,
            COLLECTIVE_S,
        )
        # Imports take longer than ranks wait for each other, on a machine that is busy.
        self._on_each(ranks, None, job, {})
        return self._on_each(ranks, at, job, arguments)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that were needed so far."""
        return [process.pid for process, _ in self._workers]

    def close(self) -> None:
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.kill()  # it has nothing to save
            process.join()
        self._server.close()

    def _start(self, rank: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=work, args=(rank, there), daemon=True)
        process.start()
        there.close()
        self._workers.append((process, here))

    def _on_each(
        self, ranks: int, at: WorldRendezvous | None, job: str, arguments: dict[str, Any]
    ) -> list[Any]:
        self._tasks += 1
        for _, connection in self._workers[:ranks]:
            connection.send((self._tasks, at, job, arguments))
        replies = [self._reply(rank) for rank in range(ranks)]
        for rank, (failed, reply) in enumerate(replies):
            if failed:
                raise WorkerFailed(f"rank {rank} of {ranks}:\n{reply}")
        return [reply for _, reply in replies]

    def _reply(self, rank: int) -> tuple[bool, Any]:
        """Whether the present task failed on a rank, and its answer or traceback.

        Answers to earlier tasks, which came too late, are discarded.
        """
        connection = self._workers[rank][1]
        while connection.poll(self.deadline_s):
            task, failed, reply = connection.recv()
            if task == self._tasks:
                return failed, reply
        return True, f"no answer within {self.deadline_s} s"


def a_world() -> Iterator[World]:
    """The body of a session fixture."""
    world = World()
    try:
        yield world
    finally:
        world.close()


def work(rank: int, connection: Connection) -> None:
    """The main of a worker: jobs until the pipe is closed."""
    import torch  # noqa: PLC0415 -- only workers need it

    torch.set_num_threads(1)
    while True:
        try:
            task, at, job, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = task, False, run_job(rank, at, job, arguments)
        except Exception:  # noqa: BLE001 -- the test process judges it
            reply = task, True, traceback.format_exc()
        gc.collect()  # a trainer is a cycle, and holds process groups of three threads each
        connection.send(reply)


def run_job(rank: int, at: WorldRendezvous | None, job: str, arguments: dict[str, Any]) -> Any:
    """One job in a process group of its own, made as a run makes it; alone without one.

    Without a place to meet, its module is imported and nothing else.
    """
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415

    from offbeat.trainers.ranks.peers import SingleRank  # noqa: PLC0415
    from offbeat.trainers.ranks.process_group import join  # noqa: PLC0415

    module, _, name = job.partition(":")
    function = getattr(importlib.import_module(module), name)
    if at is None:
        return None
    if at.size == 1:
        return function(SingleRank(), **arguments)
    peers = join(at, rank, "cpu", HOST)
    try:
        return function(peers, **arguments)
    finally:
        dist.destroy_process_group()
        # torch keeps how DTensors are computed with by the ranks of their mesh alone, and would find
        # the mesh of an earlier world by the number that one of its groups had.
        _clear_sharding_prop_cache()
