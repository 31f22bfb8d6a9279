"""Ports of the controller that take measured times on a virtual clock, and do nothing else.

engine      sequences share its pace: the more decode side by side, the slower each of them
trainer     serves calls one by one: a part of the step for each group, the rest in ``finish``
cores       what computes shares them, if the run's processes are said to
journal     adds up what it is handed, as the journal of a run does
"""
# ruff: noqa: ARG002 - a port takes what it is handed, and these look at little of it

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from offbeat.config.loss_spec import LossSpec
from offbeat.controller.aggregates import RunAggregates
from offbeat.controller.events import Event
from offbeat.controller.steps_after import StepsAfter
from offbeat.fakes.engine import even_spans
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Prompt, Receipt, RolloutTask, VersionSpans
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from offbeat.plugins.planning.shared_cores import LEAST, CoreUse, Job, SharedCores, SharedPace

FINISH_SHARE: Final = 0.1
"""Part of a step's time that does not depend on its groups: the optimizer, and what surrounds it."""

_BEGAN: Final = 1.0  # the virtual clock's 0 as a time of day; 0 would mean that none is known


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Work of one group: a number per sequence, in tokens or in seconds."""

    sequences: tuple[float, ...]
    outside_s: float = 0.0  # in environment, reward and transit
    prompt_tokens: int = 64  # of a sample, and those of its response: they decide on chunks
    response_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of a run's parts. One of ``n`` sequences takes ``alone + shared * n`` s per unit of work."""

    alone: float
    shared: float
    step_s: float  # of a step of ``groups`` groups in the trainer, calls included
    groups: int
    publish_s: float
    load_s: float  # from a release until an engine serves it
    pause_s: float  # of it, the engine decodes nothing
    slots: int | None = None  # sequences that an engine decodes side by side; None: any number
    step_grows: bool = True  # a step's time grows with its groups; a stand-in trainer's does not
    core_use: CoreUse | None = None  # None: each process has cores of its own


class VirtualJournal:
    """Journal that keeps nothing but what its records add up to."""

    def __init__(self) -> None:
        self.aggregates = RunAggregates()

    def append(self, event: Event) -> None:
        now_s = _BEGAN + asyncio.get_running_loop().time()
        self.aggregates.take(msgspec.structs.replace(event, unix_s=now_s))

    async def barrier(self) -> None: ...
    async def steps_after(self, version: int) -> StepsAfter:
        return StepsAfter((), ())


class VirtualPrompts:
    """Prompts without content or end."""

    def prompt(self, prompt_index: int) -> Prompt | None:
        return Prompt(prompt_index, 0, prompt_index, {})


class NoMetrics:
    """Telemetry that drops everything."""

    def emit(self, step: int, version: int, metrics: Mapping[str, float]) -> None: ...


class SharedEngine(SharedPace):
    """Engine whose sequences share its pace."""

    def __init__(self, name: str, costs: Costs, cores: SharedCores) -> None:
        super().__init__()
        self.name, self.version = name, -1
        self._costs, self._cores = costs, cores
        cores.notify(self._settle, self._resume)
        self._served = [-1]  # versions, in the order they came
        self._waiting = deque[tuple[float, Job]]()
        self._loads = 0

    async def state(self, fence: Fence) -> EngineState:
        return EngineState(self.name, "virtual", self.version, "", 0, 0, 0.0, 0)

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        """Serve a release after its time; decode nothing during the last part of it."""
        costs = self._costs
        await asyncio.sleep(max(0.0, costs.load_s - costs.pause_s))
        self._change(lambda: self._count_load(1))
        await asyncio.sleep(min(costs.pause_s, costs.load_s))
        self._change(lambda: self._count_load(-1))
        self._served.append(release.version)
        self.version = release.version
        return WeightsAck(
            self.name,
            "virtual",
            epoch,
            release.version,
            release.digest,
            costs.load_s,
            costs.pause_s,
        )

    async def decode(self, work: GroupWork) -> VersionSpans:
        """Decode the sequences of a group; return the versions they went through."""
        first = len(self._served) - 1
        units = [max(each, LEAST) for each in work.sequences]
        await self._run(len(units), lambda job: self._waiting.extend((each, job) for each in units))
        versions = self._served[first:]
        return even_spans(versions, max(len(versions), work.response_tokens))

    async def restart(self) -> None: ...
    async def retire(self) -> None: ...
    async def close(self) -> None: ...

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
        """``work`` is given out in its order, and again from its beginning.

        So a run meets the lengths in the order in which the measured one met them.
        """
        self._engines, self._work = engines, work
        self._cores, self._use, self._worker = cores, use, asyncio.Lock()

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, None]:
        work = self._work[task.prompt_index % len(self._work)]
        spans = await self._engines[task.engine].decode(work)
        await self._outside(work.outside_s)
        return _receipt(task, spans, work.prompt_tokens), None

    async def _outside(self, wall_s: float) -> None:
        """Take the time of environment, reward and transit; what the worker computes, in turn."""
        if self._use is None:
            await asyncio.sleep(wall_s)
            return
        await asyncio.sleep(self._use.waiting_s(wall_s, self._use.group_cpu_s))
        async with self._worker:
            await self._cores.run(self._use.group_cpu_s)

    async def close(self) -> None: ...


def _receipt(task: RolloutTask, spans: VersionSpans, prompt_tokens: int) -> Receipt:
    """Return the receipt of a group whose samples all have the same response."""
    n, tokens = task.samples, sum(count for _, count in spans)
    return Receipt(
        prompt_index=task.prompt_index,
        attempt=task.attempt,
        engine=task.engine,
        engine_incarnation="virtual",
        rewards=tuple(float(sample % 2) for sample in range(n)),
        prompt_tokens=(prompt_tokens,) * n,
        response_tokens=(tokens,) * n,
        valid_tokens=(tokens,) * n,
        finish_reasons=("stop",) * n,
        version_spans=(spans,) * n,
        columns=("prompt_ids", "response_ids"),
        payload_bytes=1,
        sampling=task.sampling,
    )


class VirtualTrainer:
    """Trainer that serves one call at a time, in the order they were made."""

    def __init__(self, costs: Costs, groups_per_step: int, cores: SharedCores) -> None:
        self.version = 0
        self._costs, self._cores = costs, cores
        self._groups = costs.groups if costs.step_grows else groups_per_step
        self._turn = asyncio.Lock()

    async def state(self, fence: Fence) -> TrainerState:
        return TrainerState(1, self.version, self.version, 0, 0, "")

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        count = len(chunk.prompt_indices)
        return PreparedColumns(("policy_logprobs",), (8,) * count, (None,) * count)

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None: ...
    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        groups, costs = len(chunk.prompt_indices), self._costs
        share = (1 - FINISH_SHARE) * groups / self._groups
        await self._train(share)
        return ChunkResult(chunk.tokens, groups, 1, costs.step_s * share)

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        await self._train(FINISH_SHARE)
        self.version += 1
        return StepResult(
            applied=True, loss=0.0, grad_norm=1.0, learning_rate=1e-6, tokens=1, sequences=1,
            chunks=1, metrics={}, compute_s=self._costs.step_s,
        )  # fmt: skip

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None: ...
    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        use, publish_s = self._costs.core_use, self._costs.publish_s
        if use is None:
            await self._serve(publish_s, 0.0)
        else:
            await self._serve(0.0, publish_s / use.slowdown)
        return WeightRelease(version, f"digest-{version}", None, (), 0)

    async def save(self, fence: Fence, step: int) -> None: ...
    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        return Checkpoint(version, f"digest-{version}", 0)

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        return await self.state(fence)

    async def restart(self) -> None: ...
    async def close(self) -> None: ...

    async def _train(self, share: float) -> None:
        """Take this share of a step's time."""
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
