"""offbeat's queue as a service of its own: one actor, and clients of both kinds."""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar, cast

import ray

from benchmarks.queue_payloads import Columns, joined
from benchmarks.queue_sides import Handle, Prepared, Taken
from offbeat.queue_service import ray_actor as actor
from offbeat.queue_service.clients.asyncio_client import TransferQueueClient
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.core import ColumnSpec, QueueLimits

T = TypeVar("T")
TASK: Final = "train"
TAKE_S: Final = 60.0
LIMITS: Final = QueueLimits(max_rows=100_000, max_bytes=1 << 30)


class OffbeatSide:
    """A put is one group; what stands for 16 groups of the others is one group of their rows."""

    def __init__(self, queue: actor.Handle) -> None:
        self._client = actor.connect(queue)
        self._queue, self._loop = queue, asyncio.new_event_loop()
        self._aside: TransferQueueClient | None = None
        self._names = (f"{os.getpid()}-{number}" for number in itertools.count())

    def prepare(self, groups: Sequence[Columns]) -> Prepared:
        return joined(groups)

    def declare(self, partition: str, columns: Columns) -> None:
        specs = [ColumnSpec(name, column.dtype.name) for name, column in columns.items()]
        self._client.declare(partition, specs)

    def put(self, partition: str, payload: Prepared) -> None:
        self._client.put(partition, next(self._names), payload)

    def take(self, partition: str, groups: int, names: Sequence[str]) -> Taken:
        del groups
        lease = self._client.claim(partition, TASK, 1, names, deadline_s=TAKE_S)
        if lease is None:
            raise TimeoutError(f"{partition}: nothing came in {TAKE_S} s")
        return Taken(self._client.get_each(lease, names), lease)

    def done(self, partition: str, taken: Taken) -> None:
        del partition
        self._client.ack(cast("ClientLease", taken.token), clear=True)

    def clear(self, partition: str) -> None:
        self._client.clear_partition(partition)

    def bytes_in_use(self) -> int | None:
        return self._client.stats().arena_bytes

    def run(self, work: Awaitable[T]) -> T:
        if self._aside is None:
            self._aside = self._loop.run_until_complete(actor.connect_async(self._queue))
        return self._loop.run_until_complete(work)

    async def aput(self, partition: str, payload: Prepared) -> None:
        await self._connected.put(partition, next(self._names), payload)

    async def atake(self, partition: str, groups: int, names: Sequence[str]) -> Taken:
        del groups
        lease = await self._connected.claim(partition, TASK, 1, names, deadline_s=TAKE_S)
        if lease is None:
            raise TimeoutError(f"{partition}: nothing came in {TAKE_S} s")
        return Taken(await self._connected.get_each(lease, names), lease)

    async def adone(self, partition: str, taken: Taken) -> None:
        del partition
        await self._connected.ack(cast("ClientLease", taken.token), clear=True)

    @property
    def _connected(self) -> TransferQueueClient:
        if self._aside is None:
            raise RuntimeError("the async methods run under run()")
        return self._aside


def start() -> actor.Handle:
    """Start one actor."""
    return actor.start(LIMITS)


def connect(handle: actor.Handle) -> OffbeatSide:
    """A client, in the process that calls."""
    return OffbeatSide(handle)


def stop(handle: Handle) -> None:
    """Stop the actor; what it holds goes with it."""
    ray.kill(handle)
