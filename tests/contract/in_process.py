"""The ports over real actors that live in this process: a method called is a message sent."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from offbeat.actors.call_batching import BatchedReply, CallBatcher
from offbeat.actors.engine_actor import EngineActor
from offbeat.actors.environment_worker_actor import EnvironmentActor
from offbeat.config.loss_spec import LossSpec
from offbeat.messages.failures import ActorLost, UnfitGroup
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from offbeat.rollouts.worker import EnvironmentSpec
from offbeat.trainers.errors import UnfitColumns
from offbeat.trainers.rank import TrainerRank
from offbeat.transfer_queue.schema import Columns
from offbeat.weight_sync.transport import make_release

T = TypeVar("T")
Places = tuple[tuple[tuple[int, int], ...], ...]


@dataclass
class InProcessTrainer:
    """One rank. A payload handle is the columns of its group."""

    make: Callable[[], TrainerRank]

    def __post_init__(self) -> None:
        self.rank = self.make()

    async def state(self, fence: Fence) -> TrainerState:
        return self.rank.state(fence)

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        places, payloads = flat(chunk)
        (names, sizes), columns = self.rank.prepare_logprobs(fence, loss, places, 0, *payloads)
        return PreparedColumns(names, sizes, tuple(columns))

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        self.rank.begin_train_step(fence, key, loss)

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        places, payloads = flat(chunk)
        try:
            return self.rank.train_microbatch(
                fence,
                key,
                chunk.prompt_indices,
                chunk.advantages,
                chunk.minibatches,
                places,
                0,
                *payloads,
            )
        except UnfitColumns as unfit:
            raise UnfitGroup(0, chunk.prompt_indices[unfit.place], str(unfit)) from None

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        return self.rank.finish_train_step(fence, key)

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        self.rank.abort_train_step(fence, key)

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        _, _, deltas = self.rank.about(fence)
        published, *handles = self.rank.publish_weights(fence, version)
        return make_release(version, published, tuple(handles), deltas)

    async def save(self, fence: Fence, step: int) -> None:
        self.rank.save(fence, step)

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        return self.rank.save_checkpoint(fence, version)

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        return self.rank.restore(fence, at_most)

    async def restart(self) -> None:
        self.rank.close()
        self.rank = self.make()

    async def close(self) -> None:
        self.rank.close()


def flat(chunk: Chunk) -> tuple[Places, list[Any]]:
    """Each group's columns as a payload of their own."""
    payloads = [[columns] for handles in chunk.payloads for columns in handles]
    return tuple(((place, 0),) for place in range(len(payloads))), payloads


class InProcessGenerator:
    """One engine; its process dies with the calls that are open in it."""

    def __init__(self, name: str, make: Callable[[], EngineActor]) -> None:
        self.name, self._make = name, make
        self.engine, self._incarnation_number, self._is_retired = make(), 1, False
        self._open = set[asyncio.Future[Any]]()

    async def state(self, fence: Fence) -> EngineState:
        return await self._reply(self.engine.state(fence))

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        about, handles = release.without_handles(), release.handles
        return await self._reply(self.engine.load(fence, epoch, about, *handles))

    async def exchange(
        self,
        incarnation: str,
        asked: Sequence[tuple[int, GenerateRequest]],
        cancelled: Sequence[int],
        doubted: Sequence[int],
    ) -> list[BatchedReply[GenerateResult]]:
        """What the one environment worker sends."""
        return await self._reply(
            self.engine.exchange("environment-0", incarnation, asked, cancelled, doubted)
        )

    async def restart(self) -> None:
        await self._kill()
        self.engine = self._make()

    async def retire(self) -> None:
        self._is_retired = True
        await self._kill()

    async def _kill(self) -> None:
        self._incarnation_number += 1
        for call in self._open:
            call.cancel()
        await self.engine.close()

    async def close(self) -> None:
        if not self._is_retired:
            await self.engine.close()

    async def _reply(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_retired:
            work.close()
            raise ActorLost(self.name, "a call", "its process was killed for good")
        incarnation, call = self._incarnation_number, asyncio.ensure_future(work)
        self._open.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if incarnation == self._incarnation_number:
                raise  # it is the caller who was cancelled
            raise ActorLost(self.name, "a call", "its process was killed") from None
        finally:
            self._open.remove(call)


class InProcessWorker(EnvironmentActor):
    """An environment worker that reaches its engines in this process."""

    def __init__(self, spec: EnvironmentSpec, engines: Mapping[str, InProcessGenerator]) -> None:
        super().__init__(dataclasses.replace(spec, engines={}))
        self._engines = {
            name: CallBatcher(partial(engine.exchange, "incarnation-1"))
            for name, engine in engines.items()
        }


class InProcessRollouts:
    """One worker. A payload handle is the columns of its group."""

    def __init__(self, worker: EnvironmentActor) -> None:
        self._worker: Any = worker  # to the type checker, Ray's marks make methods remote ones
        self._fence: Fence | None = None
        self._calls = CallBatcher(self._exchange)

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Columns]:
        self._fence = fence
        return await self._calls.call(task)

    async def close(self) -> None:
        self._calls.close()
        await self._worker.close()

    async def _exchange(
        self,
        asked: Sequence[tuple[int, RolloutTask]],
        cancelled: Sequence[int],
        doubted: Sequence[int],
    ) -> list[BatchedReply[tuple[Receipt, Columns]]]:
        (_, answers), columns = await self._worker.exchange(self._fence, asked, cancelled, doubted)
        payloads = iter(columns)
        return [
            BatchedReply(each.id, each.value and (each.value, next(payloads)), each.failure)
            for each in answers
        ]
