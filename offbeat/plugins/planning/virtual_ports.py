"""Ports of the controller that only spend measured times on a virtual clock.

engine      sequences share its pace: the more of them decode at once, the slower each is
trainer     serves calls one by one: a part of the step for each group, the rest in ``finish``
cores       shared by computing processes, if the run's processes share cores
journal     adds up its records, as the journal of a run does
"""
# ruff: noqa: ARG002 - a port takes what it is handed, and these look at little of it

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from offbeat.controller.events import Event
from offbeat.controller.ledger import StepsAfter
from offbeat.controller.run_stats import RunStats
from offbeat.fakes.engine import even_spans
from offbeat.fakes.instant_ports import InstantEngine, InstantTrainer
from offbeat.fakes.receipts import make_receipt
from offbeat.fakes.trainer import FINISH_SHARE
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Receipt, RolloutTask, VersionSpans
from offbeat.messages.training import Chunk, ChunkResult, StepResult
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.plugins.planning.shared_cores import LEAST, CoreUse, Job, SharedCores, SharedPace
from offbeat.telemetry.step_samples import StepSamples

_BEGAN: Final = 1.0  # the virtual clock's 0 as a time of day, because 0 would mean unknown


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Work of one group: a number per sequence, in tokens or in seconds."""

    sequences: tuple[float, ...]
    outside_s: float = 0.0  # in environment, reward and transit
    prompt_tokens: int = 64  # of a sample; with its response tokens they determine the chunks
    response_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of a run's parts. One of ``n`` sequences needs ``alone + shared * n`` s per unit."""

    alone: float
    shared: float
    step_s: float  # of a step of ``groups`` groups in the trainer, calls included
    groups: int
    publish_s: float
    load_s: float  # from a release until an engine serves it
    pause_s: float  # part of the load in which the engine decodes nothing
    slots: int | None = None  # sequences that an engine decodes at once; None: any number
    step_grows: bool = True  # a step's time grows with its groups, unlike a stand-in's
    core_use: CoreUse | None = None  # None: each process has its own cores


class VirtualJournal:
    """Journal that keeps only the sums of its records."""

    def __init__(self) -> None:
        self.stats = RunStats()

    def append(self, event: Event) -> None:
        now_s = _BEGAN + asyncio.get_running_loop().time()
        self.stats.add(msgspec.structs.replace(event, unix_s=now_s))

    async def barrier(self) -> None: ...
    async def steps_after(self, version: int) -> StepsAfter:
        return StepsAfter((), ())


class NoMetrics:
    """Telemetry that drops everything."""

    def emit(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, float],
        samples: Callable[[], StepSamples] | None = None,
    ) -> None: ...


class SharedEngine(SharedPace, InstantEngine):
    """Engine whose sequences share its pace."""

    def __init__(self, name: str, costs: Costs, cores: SharedCores) -> None:
        SharedPace.__init__(self)
        InstantEngine.__init__(self, name)
        self.load_s, self.pause_s = costs.load_s, costs.pause_s
        self._costs, self._cores = costs, cores
        cores.notify(self._settle, self._resume)
        self._served = [self.version]  # versions, in order of arrival
        self._waiting = deque[tuple[float, Job]]()
        self._loads = 0

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        """Serve a release after its load time. Decode nothing during the last part of that time."""
        await asyncio.sleep(max(0.0, self.load_s - self.pause_s))
        self._change(lambda: self._count_load(1))
        await asyncio.sleep(min(self.pause_s, self.load_s))
        self._change(lambda: self._count_load(-1))
        self._served.append(release.version)
        return await super().load_weights(fence, epoch, release)

    async def decode(self, work: GroupWork) -> VersionSpans:
        """Decode the sequences of a group; return the versions served meanwhile."""
        first = len(self._served) - 1
        units = [max(each, LEAST) for each in work.sequences]
        await self._run(len(units), lambda job: self._waiting.extend((each, job) for each in units))
        versions = self._served[first:]
        return even_spans(versions, max(len(versions), work.response_tokens))

    # --- sharing ---------------------------------------------------------------------------------

    def _count_load(self, change: int) -> None:
        self._loads += change

    def _remove(self, job: Job) -> None:
        super()._remove(job)
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not job)

    def _change(self, change: Callable[[], object]) -> None:
        self._settle()
        self._end_parts()
        change()
        slots = math.inf if self._costs.slots is None else self._costs.slots
        while self._waiting and len(self._ends) < slots:
            self._push(*self._waiting.popleft())
        use = self._costs.core_use
        if use is not None:
            decodes = bool(self._ends and not self._loads)
            self._cores.computes(self, use.engine_duty if decodes else 0.0)
        self._resume()

    def _unit_s(self) -> float:
        if self._loads or not self._ends:
            return math.inf
        measured_s = self._costs.alone + self._costs.shared * len(self._ends)
        use = self._costs.core_use
        return measured_s if use is None else use.decoding_s(measured_s, self._cores.pace)


class VirtualRollouts:
    """Sends each group to its engine, and waits for its environment."""

    def __init__(
        self,
        engines: Mapping[str, SharedEngine],
        work: Sequence[GroupWork],
        cores: SharedCores,
        use: CoreUse | None,
    ) -> None:
        """``work`` is assigned to groups in order, and starts over at its end.

        So a virtual run has the lengths in the same order as the measured run.
        """
        self._engines, self._work = engines, work
        self._cores, self._use, self._worker = cores, use, asyncio.Lock()

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, None]:
        work = self._work[task.prompt_index % len(self._work)]
        spans = await self._engines[task.engine].decode(work)
        await self._outside(work.outside_s)
        receipt = make_receipt(
            task.prompt_index,
            task.attempt,
            (spans,) * task.samples,  # all samples have the same response
            engine=task.engine,
            prompt_tokens=(work.prompt_tokens,) * task.samples,
            payload_bytes=1,
            sampling=task.sampling,
        )
        return receipt, None

    async def _outside(self, wall_s: float) -> None:
        """Sleep for environment, reward and transit time; serialize the worker's CPU part."""
        if self._use is None:
            await asyncio.sleep(wall_s)
            return
        await asyncio.sleep(self._use.waiting_s(wall_s, self._use.group_cpu_s))
        async with self._worker:
            await self._cores.run(self._use.group_cpu_s)

    async def close(self) -> None: ...


class VirtualTrainer(InstantTrainer):
    """Trainer that serves one call at a time, in the order they were made."""

    def __init__(self, costs: Costs, groups_per_step: int, cores: SharedCores) -> None:
        super().__init__()
        self.step_s = costs.step_s
        self._costs, self._cores = costs, cores
        self._groups = costs.groups if costs.step_grows else groups_per_step
        self._turn = asyncio.Lock()

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        groups = len(chunk.prompt_indices)
        share = (1 - FINISH_SHARE) * groups / self._groups
        await self._train(share)
        return ChunkResult(chunk.tokens, groups, 1, self.step_s * share)

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        await self._train(FINISH_SHARE)
        return await super().finish_train_step(fence, key)

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        use, publish_s = self._costs.core_use, self._costs.publish_s
        if use is None:
            await self._serve(publish_s, 0.0)
        else:
            await self._serve(0.0, publish_s / use.slowdown)
        return await super().publish_weights(fence, version)

    async def _train(self, share: float) -> None:
        """Spend this share of a step's time."""
        use, step_s = self._costs.core_use, self._costs.step_s
        if use is None:
            await self._serve(step_s * share, 0.0)
        else:
            waiting_s = use.waiting_s(step_s, use.step_cpu_s)
            await self._serve(waiting_s * share, use.step_cpu_s * share)

    async def _serve(self, waiting_s: float, cpu_s: float) -> None:
        async with self._turn:
            await asyncio.sleep(waiting_s)
            await self._cores.run(cpu_s)
