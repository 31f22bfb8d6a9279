"""Measures the object-store transport of weights next to a copy in memory.

    python benchmarks/weight_sync.py                          # 1 MiB to 256 MiB, 1 to 4 receivers
    python benchmarks/weight_sync.py --sizes 1024 --receivers 1 4
    python benchmarks/weight_sync.py --tensors                # cost of many small tensors

One process sends, each receiver is a process; both ends run one thread of arithmetic. *Publish* is
packing and digests in the sender; *receive* is transfer, digests and staging in the slowest receiver;
*commit* is the copy into the module, the only time an engine has to stand still. Medians; the first
round, on memory that was never touched, is reported apart. ``benchmarks/reshard.py`` measures
``reshard``.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from torch import nn

from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.object_store import ObjectStoreSender
from offbeat.weight_sync.transport import PublishedRelease
from tests.support.plain_modules import ModuleReceiver, ModuleSource

T = TypeVar("T")
Rounds = list[tuple[float, float, float]]
"""``(publish, receive, commit)`` in seconds, of each round."""

MIB = 1 << 20


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


class Receiver:
    """One engine's end."""

    def __init__(self, name: str, mib: float, tensors: int) -> None:
        torch.set_num_threads(1)
        self._receiver = ModuleReceiver(model(mib, tensors), name)

    def object_store(
        self, epoch: int, manifest: Manifest, digest: str, *chunks: np.ndarray
    ) -> tuple[float, float]:
        """Return ``(receive, commit)`` in seconds; the caller measures the time before this call."""
        receiver = self._receiver
        since = time.perf_counter()
        receiver.begin(epoch, manifest)
        for index, chunk in enumerate(chunks):
            receiver.apply(epoch, index, chunk)
        receiver.verify(digest)
        received_s = time.perf_counter() - since
        return received_s, _timed(lambda: receiver.commit(epoch))[0]


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


def figure(name: str, shape: tuple[float, int, int], timings: Rounds, memcpy: float) -> Figure:
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
    )


def main() -> None:
    """Print a line each; write all of them where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 16, 64, 256], help="MiB")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
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
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
    figures = list[Figure]()
    for shape in shapes:
        memcpy = memcpy_mib_s(shape[0])
        print(
            f"\n{shape[0]:g} MiB, {shape[1]} tensors, {shape[2]} receivers; memcpy {memcpy:,.0f} MiB/s"
        )
        timings = object_store(*shape, asked.chunk_mib, asked.rounds)
        one = figure("object_store", shape, timings, memcpy)
        figures.append(one)
        print(
            f"  publish {one.publish_s * 1e3:8.1f} ms  receive {one.receive_s * 1e3:8.1f} ms  "
            f"commit {one.commit_s * 1e3:7.1f} ms  (first {one.first_receive_s * 1e3:.0f} ms)  "
            f"{one.receive_mib_s:,.0f} MiB/s each, {one.of_memcpy:.2f} of memcpy"
        )
    if asked.out:
        asked.out.write_text(json.dumps([asdict(each) for each in figures], indent=1))


if __name__ == "__main__":
    main()
