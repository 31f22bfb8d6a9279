"""The controller's ports over parts of this process.

trainer      one rank; its calls run in its thread in the order in which they are made
engine       decodes in its thread; its other calls run on the loop of the rollouts
environment  one worker on that loop; reward and agent code runs in child processes, as on Ray

The controller has a separate loop, on which no work of a part runs.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from offbeat.config.loss_spec import LossSpec
from offbeat.generators.engine_server import EngineServer
from offbeat.generators.rows import make_empty_release
from offbeat.local.hosted import Hosted
from offbeat.local.threads import LoopThread
from offbeat.messages.failures import UnfitGroup
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
from offbeat.messages.worker_report import OnJoined, OnLost, OnReport, WorkerReport
from offbeat.rollouts.worker import EnvironmentWorker
from offbeat.trainers.errors import UnfitColumns
from offbeat.trainers.held_columns import Places
from offbeat.trainers.rank import TrainerRank
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool_reader import SpoolReader
from offbeat.weight_sync.served import ServedWeights
from offbeat.weight_sync.transport import make_release

T = TypeVar("T")


class Payload:
    """Handle of a group's columns in this process."""

    __slots__ = ("columns", "hold")

    def __init__(self, columns: Columns, hold: object = None) -> None:
        """Create the handle. ``hold`` keeps the group's copy on disk while the handle exists."""
        self.columns, self.hold = columns, hold


class LocalSpool(SpoolReader[Payload]):
    """Spool that loads groups into payloads of this process, which are never lost."""

    def make_payload(self, columns: Columns, hold: object) -> Payload:
        return Payload(columns, hold)

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        del payloads
        return set()


class LocalTrainer:
    """Port of a trainer with one rank."""

    def __init__(self, rank: Hosted[TrainerRank]) -> None:
        self._rank = rank

    async def state(self, fence: Fence) -> TrainerState:
        return await self._rank.call("start", lambda rank: rank.state(fence))

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        places, payloads = flat(chunk)
        (names, sizes), columns = await self._of_groups(
            chunk,
            "prepare_logprobs",
            lambda rank: rank.prepare_logprobs(fence, loss, places, 0, *payloads),
        )
        return PreparedColumns(names, sizes, tuple(Payload(each) for each in columns))

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        await self._rank.call("begin", lambda rank: rank.begin_train_step(fence, key, loss))

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        places, payloads = flat(chunk)
        content = chunk.prompt_indices, chunk.advantages, chunk.minibatches, places
        return await self._of_groups(
            chunk,
            "microbatch",
            lambda rank: rank.train_microbatch(fence, key, *content, 0, *payloads),
        )

    async def _of_groups(self, chunk: Chunk, during: str, work: Callable[[TrainerRank], T]) -> T:
        try:
            return await self._rank.call(during, work)
        except UnfitColumns as unfit:
            prompt_index = chunk.prompt_indices[unfit.place]
            raise UnfitGroup(unfit.rank, prompt_index, str(unfit)) from unfit

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        return await self._rank.call("finish", lambda rank: rank.finish_train_step(fence, key))

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        await self._rank.call("abort", lambda rank: rank.abort_train_step(fence, key))

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        def publish(rank: TrainerRank) -> WeightRelease:
            published, *handles = rank.publish_weights(fence, version)
            _, _, delta_handles = rank.about(fence)
            return make_release(version, published, tuple(handles), delta_handles)

        return await self._rank.call("publish", publish)

    async def save(self, fence: Fence, step: int) -> None:
        await self._rank.call("save", lambda rank: rank.save(fence, step))

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        return await self._rank.call(
            "checkpoint", lambda rank: rank.save_checkpoint(fence, version)
        )

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        return await self._rank.call("restore", lambda rank: rank.restore(fence, at_most))

    async def restart(self) -> None:
        self._rank.restart()

    async def close(self) -> None:
        with self._rank.ending():
            await self._rank.call("close", lambda rank: rank.close())


class UnpublishedLocalTrainer(LocalTrainer):
    """Port of the trainer for runs in which nothing loads its weights."""

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        """Return a release that names the version and holds no weights."""
        del fence
        return make_empty_release(version)


def flat(chunk: Chunk) -> tuple[Places, list[list[Columns]]]:
    """Return the location of each group's columns, and the columns, as a rank expects them."""
    places, payloads = list[tuple[tuple[int, int], ...]](), list[list[Columns]]()
    for handles in chunk.payloads:
        places.append(tuple((len(payloads) + at, 0) for at in range(len(handles))))
        payloads += [[handle.columns] for handle in handles]
    return tuple(places), payloads


class LocalGenerator:
    """Port of one engine."""

    def __init__(self, engine: Hosted[EngineServer], loop: LoopThread) -> None:
        """Create the port. ``loop`` runs all calls of the engine."""
        self.name = engine.name
        self._engine, self._loop = engine, loop

    async def state(self, fence: Fence) -> EngineState:
        return await self._await("state", lambda engine: engine.state(fence))

    def generate(self, request: GenerateRequest) -> Awaitable[GenerateResult]:
        """Generate for the environment worker, which runs on the engine's loop."""
        return self._engine.await_here("generate", lambda engine: engine.generate(request))

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        return await self._await(
            release.loading,
            lambda engine: engine.load(fence, epoch, release.without_handles(), *release.handles),
        )

    def ask_served(self) -> Future[ServedWeights]:
        """Ask which weights the engine serves, without waiting and without an event loop."""
        answer = self._await("read back", lambda engine: engine.served_weights())
        return asyncio.run_coroutine_threadsafe(answer, self._loop.loop)

    async def _await(
        self, during: str, work: Callable[[EngineServer], Coroutine[Any, Any, T]]
    ) -> T:
        return await self._engine.await_on(self._loop, during, work)

    async def restart(self) -> None:
        self._close_abandoned(self._engine.restart())

    async def retire(self) -> None:
        self._close_abandoned(self._engine.end())

    def _close_abandoned(self, engine: EngineServer | None) -> None:
        """Stop the decoding of an abandoned engine after its step."""
        if engine is not None:
            asyncio.run_coroutine_threadsafe(engine.close(), self._loop.loop)

    async def close(self) -> None:
        with self._engine.ending():
            await self._await("close", lambda engine: engine.close())


class LocalRollouts:
    """Port of the environment worker, which sends its requests to the engines directly."""

    def __init__(
        self,
        worker: Hosted[EnvironmentWorker],
        loop: LoopThread,
        hold: Callable[[Receipt], object],
    ) -> None:
        """Create the port.

        Args:
            worker: The worker.
            loop: The loop that all its calls run on.
            hold: Called for each finished group. Its result is kept as long as the payload exists.
        """
        self._worker, self._loop, self._hold = worker, loop, hold
        self._on_joined: OnJoined | None = None
        self._on_report: OnReport | None = None
        self._open = dict[asyncio.Task[Any], Fence]()  # used only on the loop

    def report_joined(self, on_joined: OnJoined) -> None:
        """Set the callback for the first reply of the worker."""
        self._on_joined = on_joined

    def report_lost(self, on_lost: OnLost) -> None:
        """Ignore the callback: a worker in this process can be lost only together with the run."""
        del on_lost

    def report_to(self, on_report: OnReport) -> None:
        """Set the callback for the worker's report with each reply."""
        self._on_report = on_report

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Payload]:
        async def roll_out(
            worker: EnvironmentWorker,
        ) -> tuple[Receipt, Columns, WorkerReport]:
            worker.admit(fence)
            self._cancel_open(other_than=fence)
            with self._track_open(fence):
                receipt, columns = await worker.roll_out(task)
            for column in columns.values():
                column.setflags(write=False)  # the worker's logs and the trainer also read it
            return receipt, columns, worker.report()

        receipt, columns, report = await self._worker.await_on(self._loop, "rollout", roll_out)
        if self._on_joined is not None:
            self._on_joined(self._worker.name, report.incarnation)
            self._on_joined = None  # there is only one incarnation
        self._send_report(report)
        return receipt, Payload(columns, self._hold(receipt))

    async def close(self) -> None:
        async def close(worker: EnvironmentWorker) -> WorkerReport:
            if open_tasks := self._cancel_open():
                await asyncio.wait(open_tasks)
            return await worker.close()

        with self._worker.ending():
            self._send_report(await self._worker.await_on(self._loop, "close", close))

    @contextlib.contextmanager
    def _track_open(self, fence: Fence) -> Generator[None]:
        """Keep the running task among the open groups."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 -- runs on the loop
        self._open[task] = fence
        try:
            yield
        finally:
            del self._open[task]

    def _cancel_open(self, other_than: Fence | None = None) -> list[asyncio.Task[Any]]:
        """Cancel open groups, or only groups of other controllers. Return the cancelled tasks."""
        tasks = [task for task, fence in self._open.items() if fence != other_than]
        for task in tasks:
            task.cancel()
        return tasks

    def _send_report(self, report: WorkerReport) -> None:
        if self._on_report is not None:
            self._on_report(report)
