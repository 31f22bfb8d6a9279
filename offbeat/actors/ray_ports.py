"""The controller's ports over Ray actors: thin adapters, one remote call each.

Payload handles go as top-level arguments, so that Ray resolves them: what is small travels inside
the call, what is large is read from shared memory.
"""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from offbeat.actors.call import reply_of
from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.training import (
    Chunk,
    ChunkResult,
    LossSpec,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck


class RayRollouts:
    """All environment worker actors, in turn."""

    def __init__(self, workers: Sequence[ActorHandle]) -> None:
        self._workers = list(enumerate(workers))
        self._turn = itertools.cycle(self._workers)

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        """The receipt by value; the payload stays a reference that this process owns."""
        index, worker = next(self._turn)
        receipt, payload = worker.rollout.remote(fence, task)
        return await reply_of(receipt, f"environment-{index}", "rollout"), payload

    async def close(self) -> None:
        for index, worker in self._workers:
            with contextlib.suppress(ActorLost):
                await reply_of(worker.close.remote(), f"environment-{index}", "close")


class RayGenerator:
    """One engine actor."""

    def __init__(self, name: str, engine: ActorHandle) -> None:
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
    """The trainer's rank 0; with one rank, all of it."""

    def __init__(self, rank: ActorHandle) -> None:
        self._rank = rank
        self._chunks = 0  # of a release; learnt from the first state

    async def state(self, fence: Fence) -> TrainerState:
        state: TrainerState = await self._reply(self._rank.state.remote(fence), "start")
        self._chunks = await self._reply(self._rank.weight_chunks.remote(fence), "start")
        return state

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        call = self._rank.prepare_logprobs.options(num_returns=1 + len(chunk.ordinals))
        counts, payloads = _flat(chunk)
        written, *columns = call.remote(fence, loss, counts, *payloads)
        names, sizes = await self._reply(written, "prepare_logprobs")
        return PreparedColumns(names, sizes, tuple(columns))

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        await self._reply(self._rank.begin_train_step.remote(fence, key, loss), "begin")

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        counts, payloads = _flat(chunk)
        ref = self._rank.train_microbatch.remote(
            fence, key, chunk.ordinals, chunk.advantages, counts, *payloads
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

    async def save(self, fence: Fence, directory: str) -> None:
        await self._reply(self._rank.save.remote(fence, directory), "save")

    async def close(self) -> None:
        with contextlib.suppress(ActorLost):
            await self._reply(self._rank.close.remote(), "close")

    async def _reply(self, ref: "ray.ObjectRef[Any]", during: str) -> Any:
        return await reply_of(ref, "trainer rank 0", during)


def _flat(chunk: Chunk) -> tuple[tuple[int, ...], list[Any]]:
    """How many payloads each group has, and all of them in one list."""
    counts = tuple(len(payloads) for payloads in chunk.payloads)
    return counts, list(itertools.chain.from_iterable(chunk.payloads))
