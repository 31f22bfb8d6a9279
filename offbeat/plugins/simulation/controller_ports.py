"""Ports of one controller incarnation to the fake actors. They break when it dies.

Watches a worker's process for a simulated controller, by replies and by failed calls.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from offbeat.config.loss_spec import LossSpec
from offbeat.controller.events import Event
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.ledger import StepsAfter, steps_after
from offbeat.controller.run_stats import RunStats
from offbeat.environments.prompts import MixedPrompts
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.evaluations import EvaluatedVersion
from offbeat.messages.failures import ActorLost, OffbeatError
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.fixed_times import RETRY_S
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from offbeat.plugins.simulation.actor import Actor
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.faults import FaultMoment
from offbeat.plugins.simulation.network import Report, SimulatedCall
from offbeat.plugins.simulation.processes import Process
from offbeat.plugins.simulation.records import (
    Closed,
    EngineRetired,
    Evaluated,
    PermitsUsed,
    StepReported,
)
from offbeat.plugins.simulation.worker import FakeWorker
from offbeat.telemetry.step_samples import StepSamples

OnWorker = Callable[[str, str], None]
"""Receives the name of a worker, and its process or the reason for its loss."""
PROBE_EVERY_S: Final = 2.0  # while calls are open, as ``RayWorker`` does
SILENT_S: Final = 10.0
MISSED_PROBES: Final = 2


class WorkerWatch:
    """Tracks one worker for its caller, in place of ``RayWorker``.

    A reply proves that a process is back only if its call was made after the loss. A reply to an
    earlier call may be a late one of the process that died.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reported = set[str]()  # processes that have replied
        self._losses, self.is_lost = 0, False
        self.calls: dict[SimulatedCall, None] = {}  # open
        self._probing: asyncio.Task[None] | None = None
        self.on_joined: OnWorker = lambda name, process: None  # noqa: ARG005 - nobody counts
        self.on_lost: OnWorker = lambda name, reason: None  # noqa: ARG005 - as above
        self.on_reward_calls: Callable[[str, int], None] = lambda process, calls: None  # noqa: ARG005

    def probe(self, call: Callable[..., Awaitable[object]], kill: Callable[[], None]) -> None:
        """Probe the worker while calls to it are open, or until it is back after a loss."""
        if self._probing is None:
            self._probing = asyncio.ensure_future(self._probe(call, kill))

    async def _probe(
        self, call: Callable[..., Awaitable[object]], kill: Callable[[], None]
    ) -> None:
        missed, began = 0, True
        while began or self.calls or self.is_lost:
            began = False
            await asyncio.sleep(RETRY_S if self.is_lost else PROBE_EVERY_S)
            try:
                async with asyncio.timeout(SILENT_S):
                    await call(on_report=self.answered_since())
            except TimeoutError:
                missed += 1
            except OffbeatError:
                missed = 0  # calls in progress fail with it
            else:
                missed = 0
            if missed == MISSED_PROBES:
                missed = 0
                kill()
                self.lost("it answers nothing and was killed")
        self._probing = None

    def answered_since(self) -> Callable[[Report], None]:
        """Return the callback for the reply to a call made now."""
        losses = self._losses

        def answered(report: Report) -> None:
            process, reward_calls = report
            if process not in self._reported or (self.is_lost and losses == self._losses):
                self._reported.add(process)
                self.is_lost = False
                self.on_joined(self._name, process)
            self.on_reward_calls(process, reward_calls)

        return answered

    def lost(self, reason: str) -> None:
        """Report a lost process, once until another is back, and end the calls to it."""
        if not self.is_lost:
            self._losses, self.is_lost = self._losses + 1, True
            self.on_lost(self._name, reason)
        for call in self.calls:
            if not call.reply.done():
                call.reply.set_exception(ActorLost(self._name, call.method, reason))


class Caller:
    """A controller's end of the network."""

    def __init__(self, context: SimulationContext, process: Process, fence: Fence) -> None:
        self.context, self.process, self.fence = context, process, fence
        self.asked_to_close: set[str] = set()

    async def call(
        self,
        host: Actor,
        method: str,
        fence: Fence,
        *args: object,
        on_report: Callable[[Report], None] | None = None,
        calls: dict[SimulatedCall, None] | None = None,
    ) -> Any:  # noqa: ANN401
        """Make a remote call. Cancelling it notifies the callee. ``calls`` holds it while open."""
        call = self.context.network.send(self.process, host, method, fence, *args)
        call.on_report = on_report
        if calls is not None:
            calls[call] = None
        try:
            return await call.reply
        except asyncio.CancelledError:
            self.context.network.cancel(call)
            raise
        finally:
            if calls is not None:
                del calls[call]

    async def close(
        self, *hosts: Actor, on_reports: Sequence[Callable[[Report], None] | None] = ()
    ) -> None:
        """Close all actors concurrently. ``on_reports`` has one callback per host, or is empty."""
        if not self.process.alive:
            return
        calls = list[SimulatedCall]()
        for host, on_report in itertools.zip_longest(hosts, on_reports):
            self.asked_to_close.add(host.name)
            self.context.record(Closed, host.name)
            if host.process.alive:
                call = self.context.network.send(self.process, host, "close", self.fence)
                call.on_report = on_report
                calls.append(call)
        for call in calls:
            await call.reply

    def reach(self, point: Failpoint) -> None:
        """Report to the faults that this controller reaches a failpoint."""
        if self.process.alive:
            self.context.faults.failpoint(point)

    def restart(self, host: Actor) -> None:
        if self.process.alive:
            host.die()

    def retire(self, host: Actor) -> None:
        if self.process.alive:
            self.context.record(EngineRetired, host.name)
            host.retire()


class SimulatedPrompts(FakePrompts):
    """Prompts without content, of several environments if ``mixed``."""

    def __init__(self, count: int | None, mixed: MixedPrompts | None = None) -> None:
        super().__init__(count)
        self._mixed = mixed
        self._last: Prompt | None = None  # a draw and its dispatch ask for the same prompt

    @property
    def rows(self) -> int:
        return self.count or 1

    def prompt(self, prompt_index: int) -> Prompt | None:
        if self._last is None or self._last.prompt_index != prompt_index:
            self._last = super().prompt(prompt_index)
            if self._mixed is not None and self._last is not None:
                self._last = self._mixed.prompt(prompt_index)
        return self._last


class SimulatedRollouts:
    """Rollouts on the workers in turn, with a count of unanswered tasks. It skips lost workers."""

    def __init__(
        self,
        caller: Caller,
        workers: list[FakeWorker],
        buffer_use: Callable[[], tuple[int, int]],
    ) -> None:
        self._caller, self._workers, self._buffer_use = caller, workers, buffer_use
        self._turn = 0
        self._watches = [WorkerWatch(worker.name) for worker in workers]
        self.open = 0
        self._peaks = (0, 0, 0)
        self._looks = False

    def report_reward_calls(self, on_reward_calls: Callable[[str, int], None]) -> None:
        """Set the callback for the number of calls that a worker process has made so far."""
        for watch in self._watches:
            watch.on_reward_calls = on_reward_calls

    def report_processes(self, on_joined: OnWorker, on_lost: OnWorker) -> None:
        """Set the callbacks for each worker process that joins, and for each that is lost."""
        for watch in self._watches:
            watch.on_joined, watch.on_lost = on_joined, on_lost

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        place = self._next()
        worker, watch = self._workers[place], self._watches[place]
        watch.probe(
            partial(self._caller.call, worker, "alive", fence),
            partial(self._caller.restart, worker),
        )
        if not task.evaluation:
            self.open += 1
            self._look_soon()
        try:
            return await self._caller.call(
                worker,
                "rollout",
                fence,
                task,
                on_report=watch.answered_since(),
                calls=watch.calls,
            )
        except ActorLost as lost:
            watch.lost(lost.detail)
            raise
        finally:
            self.open -= not task.evaluation

    def _next(self) -> int:
        """Return the index of the next worker that is not lost, or the next one if all are."""
        self._turn += 1
        in_turn = [(self._turn + later) % len(self._workers) for later in range(len(self._workers))]
        return next((each for each in in_turn if not self._watches[each].is_lost), in_turn[0])

    def _look_soon(self) -> None:
        """Count after all events of this moment, because a cancelled call leaves late."""
        if not self._looks:
            self._looks = True
            self._caller.context.loop.run_in(1e-9, self._caller.process, self._look)

    def _look(self) -> None:
        self._looks = False
        now, peaks = (self.open, *self._buffer_use()), self._peaks
        if now[0] > peaks[0] or now[1] > peaks[1] or now[2] > peaks[2]:
            first, second, third = map(max, now, peaks)
            self._peaks = first, second, third
            caller = self._caller
            caller.context.record(PermitsUsed, caller.fence.incarnation, *self._peaks)

    async def close(self) -> None:
        await self._caller.close(
            *self._workers, on_reports=[watch.answered_since() for watch in self._watches]
        )


class SimulatedGenerator:
    """Port of one simulated engine."""

    def __init__(self, caller: Caller, engine: Actor) -> None:
        self.name = engine.name
        self._caller, self._engine = caller, engine

    async def state(self, fence: Fence) -> EngineState:
        return await self._caller.call(self._engine, "state", fence)

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        return await self._caller.call(self._engine, "load_weights", fence, epoch, release)

    async def restart(self) -> None:
        self._caller.restart(self._engine)

    async def retire(self) -> None:
        self._caller.retire(self._engine)

    async def close(self) -> None:
        await self._caller.close(self._engine)


class SimulatedTrainer:
    """Port of all simulated trainer ranks."""

    def __init__(self, caller: Caller, trainer: Actor) -> None:
        self._call, self._caller, self._trainer = caller.call, caller, trainer

    async def state(self, fence: Fence) -> TrainerState:
        return await self._call(self._trainer, "state", fence)

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        return await self._call(self._trainer, "prepare_logprobs", fence, chunk, loss)

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        await self._call(self._trainer, "begin_train_step", fence, key, loss)

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        return await self._call(self._trainer, "train_microbatch", fence, key, chunk)

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        return await self._call(self._trainer, "finish_train_step", fence, key)

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        await self._call(self._trainer, "abort_train_step", fence, key)

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        return await self._call(self._trainer, "publish_weights", fence, version)

    async def save(self, fence: Fence, step: int) -> None:
        await self._call(self._trainer, "save", fence, step)

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        return await self._call(self._trainer, "save_checkpoint", fence, version)

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        return await self._call(self._trainer, "restore", fence, at_most)

    async def restart(self) -> None:
        self._caller.restart(self._trainer)

    async def close(self) -> None:
        await self._caller.close(self._trainer)


class SimulatedJournal:
    """Journal in memory with a durable prefix. Killing its writer may lose the rest."""

    def __init__(
        self, context: SimulationContext, process: Process, events: list[msgspec.Struct]
    ) -> None:
        self._context, self._process = context, process
        self.events = events
        self.stats = RunStats.fold(events)  # type: ignore[arg-type]
        self.durable = len(events)

    def append(self, event: Event) -> None:
        self.stats.add(event)
        if self._process.alive:
            self.events.append(event)
            self._context.faults.record(len(self.events))

    async def barrier(self) -> None:
        reached, loop = len(self.events), self._context.loop
        if reached > self.durable:
            synced = loop.create_future()
            takes_s = 0.002 + self._context.network.latency()
            loop.run_in(takes_s, self._process, self._synced, synced, reached)
            await synced

    async def steps_after(self, version: int) -> StepsAfter:
        await self.barrier()
        return steps_after(version, reversed(self.events))  # type: ignore[arg-type]

    def _synced(self, synced: "asyncio.Future[None]", reached: int) -> None:
        self.durable = max(self.durable, reached)
        if not synced.done():
            synced.set_result(None)

    def cut(self, rng: random.Random) -> None:
        """Simulate a kill of the writer, which loses a part of the unsynced tail."""
        kept = rng.randint(self.durable, len(self.events))
        del self.events[kept:]


_REPORTED: Final = ("masked_fraction", "retried_fraction", "branches_mean", "branched_fraction")


class SimulatedTelemetry:
    """Telemetry sink. Only records that the controller did not emit count as lost."""

    def __init__(self, context: SimulationContext) -> None:
        self._context = context
        self.emitted: dict[int, None] = {}  # emitted versions

    def emit(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, float],
        samples: Callable[[], StepSamples] | None = None,
    ) -> None:
        del samples
        if "eval/version" not in metrics:
            self._context.faults.at(FaultMoment.EMIT, "controller")
            self.emitted[version] = None
            reported = [metrics[f"rollout/{name}"] for name in _REPORTED]
            self._context.record(StepReported, step, version, *reported)


class SimulatedEvaluationLog:
    """Evaluations in the run directory, which outlives the controller that wrote them."""

    def __init__(self, context: SimulationContext, process: Process) -> None:
        self._context, self._process = context, process

    def has(self, due: int) -> bool:
        return due in self._context.disk.evaluations

    def take(self, evaluated: EvaluatedVersion) -> None:
        if self._process.alive:
            self._context.disk.evaluations.add(evaluated.due)
            samples = tuple((each.set, each.prompt_index) for each in evaluated.samples)
            self._context.record(Evaluated, evaluated.due, evaluated.version, samples)


class SpooledPayloads:
    """Spooled payloads that can be read from disk.

    After reading, they are in the memory of the controller's machine.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def readable(self, receipt: Receipt) -> object | None:
        context, incarnation = self._caller.context, self._caller.fence.incarnation
        if receipt.spooled is None:
            return None
        copy = context.disk.spooled[receipt.spooled]
        return replace(
            copy, incarnation=incarnation, memory=context.machines.memory_of("controller")
        )

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        """Return lost payloads.

        Payloads on a machine that is cut off but not given up may still return.
        """
        context = self._caller.context
        return {
            prompt_index
            for prompt_index, (columns, *_) in payloads.items()
            if context.is_gone(columns) and not context.machines.noticed_in_s(columns.memory)
        }
