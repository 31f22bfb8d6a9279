"""The floor: ``ray.put`` by the producer, the reference handed over by one async actor.

The cheapest queue one can build on Ray: no schema, no lease, no bound, and what it holds dies with the
producer. A take waits in the actor.
"""

import asyncio
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, cast

import ray

from benchmarks.queue_memory import ObjectStore
from benchmarks.queue_payloads import Columns, joined
from benchmarks.queue_sides import Handle, Prepared, Taken

T = TypeVar("T")
Refs = list["ray.ObjectRef[Any]"]


class _Hand:
    """Passes references on, oldest first."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, asyncio.Queue[Refs]] = defaultdict(asyncio.Queue)

    async def put(self, partition: str, refs: Refs) -> None:
        self._waiting[partition].put_nowait(refs)

    async def take(self, partition: str) -> Refs:
        return await self._waiting[partition].get()

    async def clear(self, partition: str) -> None:
        self._waiting.pop(partition, None)


class RefsSide:
    """A list of one reference stands for the rows of one call."""

    def __init__(self, hand: Handle) -> None:
        warnings.filterwarnings("ignore", message=".*not writable.*")
        self._hand = hand

    def prepare(self, groups: Sequence[Columns]) -> Prepared:
        return joined(groups)

    def declare(self, partition: str, columns: Columns) -> None:
        pass

    def put(self, partition: str, payload: Prepared) -> None:
        ray.get(self._hand.put.remote(partition, [ray.put(payload)]))

    def take(self, partition: str, groups: int, names: Sequence[str]) -> Taken:
        del groups, names
        refs = ray.get(self._hand.take.remote(partition))
        return Taken([ray.get(refs[0])], refs)

    def done(self, partition: str, taken: Taken) -> None:
        del partition
        cast("Refs", taken.token).clear()

    def clear(self, partition: str) -> None:
        ray.get(self._hand.clear.remote(partition))

    def bytes_in_use(self) -> int | None:
        return ObjectStore().bytes_used()

    def run(self, work: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await work

        return asyncio.run(awaited())

    async def aput(self, partition: str, payload: Prepared) -> None:
        await self._hand.put.remote(partition, [ray.put(payload)])

    async def atake(self, partition: str, groups: int, names: Sequence[str]) -> Taken:
        del groups, names
        refs = await self._hand.take.remote(partition)
        return Taken([await refs[0]], refs)

    async def adone(self, partition: str, taken: Taken) -> None:
        self.done(partition, taken)


def start() -> Handle:
    """Start one actor."""
    return ray.remote(_Hand).options(num_cpus=0, max_concurrency=1000).remote()


def connect(handle: Handle) -> RefsSide:
    """A client of it."""
    return RefsSide(handle)


def stop(handle: Handle) -> None:
    """Frees what it holds."""
    ray.kill(handle)
