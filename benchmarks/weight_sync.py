"""Measures bytes per second of each weight transport, beside what the machine can do at best.

    python benchmarks/weight_sync.py                          # 1 MiB to 256 MiB, 1 to 4 receivers
    python benchmarks/weight_sync.py --sizes 1024 --receivers 1 4
    python benchmarks/weight_sync.py --tensors                # cost of many small tensors

One process sends, each receiver is a process; both ends run one thread of arithmetic. *Publish* is
packing and digests in the sender; *receive* is transfer, digests and staging in the slowest receiver;
*commit* is the copy into the module, the only time an engine has to stand still. Limits in the same
run: a copy in memory, and a bare gloo broadcast of the same bytes among the same processes. Medians;
the first round of each, on memory that was never touched, is reported apart.
"""

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from torch import nn

from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import ModuleReceiver
from offbeat.weight_sync.source import ModuleSource
from offbeat.weight_sync.transport import PublishedRelease
from offbeat.weight_sync.transports.gloo_receiver import GlooReceiver
from offbeat.weight_sync.transports.gloo_sender import GlooSender
from offbeat.weight_sync.transports.group import BroadcastGroup, Device, meet, opened
from offbeat.weight_sync.transports.messages import RoundPlan, Route, TransferTimeouts
from offbeat.weight_sync.transports.object_store import ObjectStoreSender

T = TypeVar("T")
Rounds = list[tuple[float, float, float]]
"""``(publish, receive, commit)`` in seconds, of each round."""

HOST = "127.0.0.1"
MIB = 1 << 20
TIMEOUTS = TransferTimeouts(slowest_bytes_per_s=2e6, slack_s=60.0)


@dataclass(frozen=True)
class Figure:
    """Seconds, medians over the rounds after the first; MiB/s of one copy of the weights."""

    transport: str
    mib: float
    tensors: int
    receivers: int
    publish_s: float
    receive_s: float
    commit_s: float
    first_receive_s: float
    receive_mib_s: float
    of_memcpy: float
    of_broadcast: float | None


def model(mib: float, tensors: int) -> nn.ParameterDict:
    """Generated weights: bfloat16 matrices of one size."""
    elements = max(int(mib * MIB / 2 / tensors), 1)
    torch.manual_seed(0)
    return nn.ParameterDict(
        {f"w{i}": nn.Parameter(torch.randn(elements).bfloat16(), requires_grad=False)
         for i in range(tensors)}
    )  # fmt: skip


def memcpy_mib_s(mib: float) -> float:
    """Copy warm memory in one thread; return the rate."""
    a, b = np.ones(int(mib * MIB), np.uint8), np.zeros(int(mib * MIB), np.uint8)
    times = [_timed(lambda: np.copyto(b, a))[0] for _ in range(7)]
    return mib / statistics.median(times[1:])


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    since = time.perf_counter()
    value = work()
    return time.perf_counter() - since, value


# --- a receiver's process --------------------------------------------------------------------------


class Receiver:
    """One engine's end, on every transport."""

    def __init__(self, name: str, mib: float, tensors: int) -> None:
        torch.set_num_threads(1)
        self._receiver = ModuleReceiver(model(mib, tensors), name)
        self._gloo = GlooReceiver(name)
        self._name = name

    def gloo(
        self, epoch: int, manifest: Manifest, digest: str, route: Route, members: tuple[str, ...]
    ) -> tuple[float, float]:
        """``(receive, commit)`` in seconds."""
        receiver = self._receiver
        since = time.perf_counter()
        receiver.begin(epoch, manifest)
        self._gloo.receive(
            route, epoch, members, manifest, lambda index, data: receiver.apply(epoch, index, data)
        )
        receiver.verify(digest)
        received_s = time.perf_counter() - since
        return received_s, _timed(lambda: receiver.commit(epoch))[0]

    def object_store(
        self, epoch: int, manifest: Manifest, digest: str, *chunks: np.ndarray
    ) -> tuple[float, float]:
        """Receive like ``gloo``; the time from the call to here is the caller's to measure."""
        receiver = self._receiver
        since = time.perf_counter()
        receiver.begin(epoch, manifest)
        for index, chunk in enumerate(chunks):
            receiver.apply(epoch, index, chunk)
        receiver.verify(digest)
        received_s = time.perf_counter() - since
        return received_s, _timed(lambda: receiver.commit(epoch))[0]

    def bare(self, route: Route, plan: RoundPlan, rank: int, sizes: list[int]) -> float:
        """Seconds of nothing but broadcasts."""
        buffers = [np.ones(size, np.uint8) for size in sizes]  # touched: no page faults below
        place, device = meet(route, "bare", plan, rank), Device(HOST, TIMEOUTS.slack_s)
        with opened(lambda: BroadcastGroup(place, device)) as group:
            group.broadcast(np.zeros(1, np.uint8), TIMEOUTS.slack_s)
            since = time.perf_counter()
            for buffer in buffers:
                group.broadcast(buffer, TIMEOUTS.of(buffer.nbytes))
            return time.perf_counter() - since


def _serve(channel: Connection, name: str, mib: float, tensors: int) -> None:
    receiver = Receiver(name, mib, tensors)
    channel.send("ready")
    while (call := channel.recv()) is not None:
        method, arguments = call
        channel.send(getattr(receiver, method)(*arguments))


class Processes:
    """Receivers in processes of their own."""

    def __init__(self, count: int, mib: float, tensors: int) -> None:
        context = mp.get_context("spawn")
        self.names = tuple(f"g{index}" for index in range(count))
        self._pipes = list[Connection]()
        self._processes = list[Any]()
        for name in self.names:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, name, mib, tensors), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def ask(self, method: str, *arguments: tuple[Any, ...]) -> None:
        """Each is given its own arguments."""
        for pipe, each in zip(self._pipes, arguments, strict=True):
            pipe.send((method, each))

    def answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


# --- the transports --------------------------------------------------------------------------------


def gloo(
    mib: float, tensors: int, receivers: int, chunk_mib: int, rounds: int
) -> tuple[Rounds, float]:
    """Rounds of ``(publish, receive, commit)``, and the seconds of a bare broadcast."""
    source = ModuleSource(model(mib, tensors), chunk_mib * MIB)
    sender = GlooSender(source, host=HOST, incarnation="bench", timeouts=TIMEOUTS)
    group = Processes(receivers, mib, tensors)
    timings: Rounds = []
    for epoch in range(1, rounds + 1):
        publish_s, (manifest, digest, (route,), *_) = _timed(lambda: sender.publish(1))
        call = (epoch, manifest, digest, route, group.names)
        since = time.perf_counter()
        group.ask("gloo", *[call] * receivers)
        answers = group.answers()
        receive_s = time.perf_counter() - since
        timings.append((publish_s, receive_s, max(commit_s for _, commit_s in answers)))
    bare = []
    sizes = list(source.manifest.chunk_nbytes)
    buffers = [np.ones(size, np.uint8) for size in sizes]
    for round_ in range(rounds):
        plan = RoundPlan(round_, group.names)
        group.ask("bare", *[(route, plan, 1 + each, sizes) for each in range(receivers)])
        place = sender._rendezvous.of("bare", plan, 0)  # noqa: SLF001 -- a broadcast of our own
        device = Device(HOST, TIMEOUTS.slack_s)
        with opened(partial(BroadcastGroup, place, device)) as ranks:
            ranks.broadcast(np.zeros(1, np.uint8), TIMEOUTS.slack_s)
            for buffer in buffers:
                ranks.broadcast(buffer, TIMEOUTS.of(buffer.nbytes))
            bare.append(max(group.answers()))
    group.close()
    sender.close()
    return timings, statistics.median(bare[1:])


class StoreTrainer:
    """The sender's process on Ray."""

    def __init__(self, mib: float, tensors: int, chunk_mib: int) -> None:
        torch.set_num_threads(1)
        source = ModuleSource(model(mib, tensors), chunk_mib * MIB)
        self._sender = ObjectStoreSender(source)

    def handles(self) -> int:
        return self._sender.handles

    def publish(self) -> tuple[Any, ...]:
        published: PublishedRelease = self._sender.publish(1)
        return (published.manifest, published.digest), *published.handles


def object_store(mib: float, tensors: int, receivers: int, chunk_mib: int, rounds: int) -> Rounds:
    """Rounds of ``(publish, receive, commit)``."""
    options: dict[str, Any] = {"num_cpus": 0}
    trainer: Any = ray.remote(StoreTrainer).options(**options).remote(mib, tensors, chunk_mib)
    engines: list[Any] = [
        ray.remote(Receiver).options(**options).remote(f"g{i}", mib, tensors)
        for i in range(receivers)
    ]
    count: int = ray.get(trainer.handles.remote())
    timings: Rounds = []
    for epoch in range(1, rounds + 1):
        since = time.perf_counter()
        meta, *chunks = trainer.publish.options(num_returns=count + 1).remote()
        manifest, digest = ray.get(meta)
        publish_s = time.perf_counter() - since
        since = time.perf_counter()
        answers = ray.get(
            [e.object_store.remote(epoch, manifest, digest, *chunks) for e in engines]
        )
        timings.append((publish_s, time.perf_counter() - since, max(c for _, c in answers)))
        del chunks
    for actor in (trainer, *engines):
        ray.kill(actor)
    return timings


def figure(
    name: str, shape: tuple[float, int, int], timings: Rounds, memcpy: float, bare_s: float | None
) -> Figure:
    """Medians of what was measured."""
    mib, tensors, receivers = shape
    publish_s, receive_s, commit_s = (
        statistics.median(each) for each in zip(*timings[1:], strict=True)
    )
    receive_s -= commit_s  # the answer comes after the commit
    rate = mib / receive_s
    return Figure(
        *(name, mib, tensors, receivers, publish_s, receive_s, commit_s, timings[0][1], rate),
        of_memcpy=rate / memcpy,
        of_broadcast=None if bare_s is None else bare_s / receive_s,
    )


def main() -> None:
    """Print a line each; write all of them where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64, 256], help="MiB")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--transports", nargs="+", default=["object_store", "gloo"])
    parser.add_argument("--tensors", action="store_true", help="64 MiB in 10 to 10,000 tensors")
    parser.add_argument("--chunk-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shapes = (
        [(64.0, count, 1) for count in (10, 100, 1_000, 10_000)]
        if asked.tensors
        else [(mib, 64, n) for mib in asked.sizes for n in asked.receivers]
    )
    if "object_store" in asked.transports:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
    figures = list[Figure]()
    for shape in shapes:
        memcpy = memcpy_mib_s(shape[0])
        print(
            f"\n{shape[0]:g} MiB, {shape[1]} tensors, {shape[2]} receivers; memcpy {memcpy:,.0f} MiB/s"
        )
        for name in asked.transports:
            if name == "gloo":
                timings, bare_s = gloo(*shape, asked.chunk_mib, asked.rounds)
            else:
                timings, bare_s = object_store(*shape, asked.chunk_mib, asked.rounds), None
            one = figure(name, shape, timings, memcpy, bare_s)
            figures.append(one)
            of = "" if one.of_broadcast is None else f", {one.of_broadcast:.2f} of a bare broadcast"
            print(
                f"  {name:13} publish {one.publish_s * 1e3:8.1f} ms  receive "
                f"{one.receive_s * 1e3:8.1f} ms  commit {one.commit_s * 1e3:7.1f} ms  "
                f"(first {one.first_receive_s * 1e3:.0f} ms)  {one.receive_mib_s:,.0f} MiB/s each, "
                f"{one.of_memcpy:.2f} of memcpy{of}"
            )
    if asked.out:
        asked.out.write_text(json.dumps([asdict(each) for each in figures], indent=1))


if __name__ == "__main__":
    main()
