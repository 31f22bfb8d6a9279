"""The controller's ports over Ray actors: thin adapters, one remote call each.

Payload handles go as top-level arguments, so that Ray resolves them: what is small travels inside
the call, what is large is read from shared memory.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from offbeat.actors.call import reply_of
from offbeat.actors.coalesce import Answer, Coalescer, Exchange
from offbeat.actors.handles import Handle
from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    LossSpec,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from offbeat.transfer_queue.schema import Columns

T = TypeVar("T")
Places = tuple[tuple[tuple[int, int], ...], ...]
"""For each group, where its columns are: ``(object, index in it)``, in the order written."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A payload handle: one group's columns inside an object that may hold several groups'.

    The object is freed with the last handle to it.
    """

    ref: "ray.ObjectRef[list[Columns]]"
    index: int


class RayRollouts:
    """All environment worker actors, in turn; tasks to the same one are coalesced."""

    def __init__(self, workers: Sequence[Handle]) -> None:
        self._workers = list(workers)
        self._fence: Fence | None = None
        self._calls = [
            Coalescer(self._exchange_with(index, worker)) for index, worker in enumerate(workers)
        ]
        self._turn = itertools.cycle(self._calls)

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Packed]:
        """The receipt by value; the payload stays a reference that this process owns."""
        self._fence = fence
        return await next(self._turn).call(task)

    async def close(self) -> None:
        for calls in self._calls:
            calls.close()
        async with asyncio.TaskGroup() as closing:
            for index, worker in enumerate(self._workers):
                closing.create_task(self._close_one(index, worker))

    @staticmethod
    async def _close_one(index: int, worker: Handle) -> None:
        with contextlib.suppress(ActorLost):
            await reply_of(worker.close.remote(), f"environment-{index}", "close")

    def _exchange_with(
        self, index: int, worker: Handle
    ) -> Exchange[RolloutTask, tuple[Receipt, Packed]]:
        async def exchange(
            asked: Sequence[tuple[int, RolloutTask]], cancelled: Sequence[int]
        ) -> list[Answer[tuple[Receipt, Packed]]]:
            answers, payload = worker.exchange.remote(self._fence, asked, cancelled)
            places = itertools.count()
            return [
                Answer(
                    each.id,
                    None if each.value is None else (each.value, Packed(payload, next(places))),
                    each.failure,
                )
                for each in await reply_of(answers, f"environment-{index}", "rollout")
            ]

        return exchange


class RayGenerator:
    """One engine actor."""

    def __init__(self, name: str, engine: Handle) -> None:
        self.name = name
        self._engine = engine

    async def state(self, fence: Fence) -> EngineState:
        return await reply_of(self._engine.state.remote(fence), self.name, "state")

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        ref = self._engine.load_weights.remote(
            fence, epoch, release.version, release.digest, release.manifest, *release.chunks
        )
        return await reply_of(ref, self.name, "weight sync")

    async def restart(self) -> None:
        ray.kill(self._engine, no_restart=False)

    async def close(self) -> None:
        with contextlib.suppress(ActorLost):
            await reply_of(self._engine.close.remote(), self.name, "close")


class RayTrainer:
    """The trainer's rank 0; with one rank, all of it.

    A rank that was killed comes back by itself, with the initial model. Until it is up, every call
    raises ``ActorLost``; the first ``state`` that answers says it is. One that is being killed may
    still answer calls for a moment: ``state`` does not take its word.
    """

    def __init__(self, rank: Handle) -> None:
        self._rank = rank
        self._chunks = 0  # of a release; learnt from the first state
        self._life = self._killed = ""  # names of process lives

    async def state(self, fence: Fence) -> TrainerState:
        life, self._chunks = await self._reply(self._rank.about.remote(fence), "start")
        if life == self._killed:
            raise ActorLost("trainer rank 0", "start", f"{life} is being killed")
        self._life = life
        return await self._reply(self._rank.state.remote(fence), "start")

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        places, payloads = flat(chunk)
        written, columns = self._rank.prepare_logprobs.remote(fence, loss, places, *payloads)
        names, sizes = await self._reply(written, "prepare_logprobs")
        return PreparedColumns(
            names, sizes, tuple(Packed(columns, index) for index in range(len(sizes)))
        )

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        await self._reply(self._rank.begin_train_step.remote(fence, key, loss), "begin")

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        places, payloads = flat(chunk)
        ref = self._rank.train_microbatch.remote(
            fence, key, chunk.ordinals, chunk.advantages, places, *payloads
        )
        return await self._reply(ref, "microbatch")

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        return await self._reply(self._rank.finish_train_step.remote(fence, key), "finish")

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        await self._reply(self._rank.abort_train_step.remote(fence, key), "abort")

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        call = self._rank.publish_weights.options(num_returns=1 + self._chunks)
        meta, *chunks = call.remote(fence, version)
        manifest, digest = await self._reply(meta, "publish")
        return WeightRelease(version, digest, manifest, tuple(chunks), manifest.nbytes)

    async def save(self, fence: Fence, step: int) -> None:
        await self._reply(self._rank.save.remote(fence, step), "save")

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        return await self._reply(self._rank.save_checkpoint.remote(fence, version), "checkpoint")

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        return await self._reply(self._rank.restore.remote(fence, at_most), "restore")

    async def restart(self) -> None:
        self._killed = self._life
        ray.kill(self._rank, no_restart=False)

    async def close(self) -> None:
        with contextlib.suppress(ActorLost):
            await self._reply(self._rank.close.remote(), "close")

    async def _reply(self, ref: "ray.ObjectRef[T]", during: str) -> T:
        return await reply_of(ref, "trainer rank 0", during)


def flat(chunk: Chunk) -> tuple[Places, list[Any]]:
    """Every object of a chunk once, and for each group where its columns are in them."""
    refs: dict[Any, int] = {}
    places = tuple(
        tuple((refs.setdefault(handle.ref, len(refs)), handle.index) for handle in handles)
        for handles in chunk.payloads
    )
    return places, list(refs)
