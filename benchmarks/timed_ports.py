"""Implements ports that take the time a cluster would, on the event loop's clock.

rollouts    a group holds one slot of its engine for its length; those without one wait in order
engines     stand still while they take weights
trainer     serves calls one by one: a share of the step for each group, the rest in ``finish``
journal     a barrier takes as long as an fsync
"""
# ruff: noqa: ARG002 - a port takes what it is handed, and these look at little of it

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.noop_ports import NoJournal, receipt
from offbeat.config.loss_spec import LossSpec
from offbeat.fakes.engine import even_spans
from offbeat.fakes.instant_ports import InstantEngine, InstantTrainer
from offbeat.fakes.trainer import FINISH_SHARE
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Receipt, RolloutTask, VersionSpans
from offbeat.messages.training import Chunk, ChunkResult, StepResult
from offbeat.messages.weights import WeightRelease, WeightsAck

_TOKENS_PER_S: Final = 1000


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds."""

    step_s: float = 0.5  # the trainer's compute of one step
    publish_s: float = 0.05  # the trainer makes a release
    load_s: float = 0.05  # an engine takes it
    load_stops: bool = True  # and decodes nothing meanwhile
    call_s: float = 0.001  # a message to an actor, or back
    barrier_s: float = 0.002  # the journal's fsync


class TimedJournal(NoJournal):
    """Journal that keeps nothing; a barrier takes its time."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self._costs = costs

    async def barrier(self) -> None:
        await asyncio.sleep(self._costs.barrier_s)


class TimedEngine(InstantEngine):
    """Engine with ``slots`` groups that decode side by side, each at a constant pace."""

    def __init__(self, name: str, slots: int, costs: Costs) -> None:
        super().__init__(name)
        self.slots = slots
        self.decoded_s = 0.0
        """Of slots, in groups that ended or were cancelled."""
        self.loads = 0
        self.load_s = self.pause_s = costs.load_s
        self._costs = costs
        self._free = asyncio.Semaphore(slots)
        self._served = list[int]()  # versions, in the order they came
        self._still_s = 0.0  # it stands still while loading, the load under way included
        self._loaded_at = 0.0  # end of the last load, also in the future

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        """Open groups go on after it, under the new weights."""
        load_s = self._costs.load_s
        self.loads += 1
        if self._costs.load_stops:
            self._still_s += load_s
            self._loaded_at = asyncio.get_running_loop().time() + load_s
        await asyncio.sleep(load_s)
        self._served.append(release.version)
        ack = await super().load_weights(fence, epoch, release)
        return msgspec.structs.replace(ack, busy_s=self.busy_s)

    @property
    def busy_s(self) -> float:
        """Return the engine's busy time: what its slots decoded, spread over all of them."""
        return self.decoded_s / self.slots

    async def decode(self, seconds: float) -> VersionSpans:
        """Hold a slot until ``seconds`` of decoding are done; the versions it went through."""
        async with self._free:
            clock = asyncio.get_running_loop().time
            first, begun = len(self._served) - 1, clock()
            still_before = self._still_s - max(0.0, self._loaded_at - begun)
            end = begun + seconds
            try:
                while (now := clock()) < (end := begun + seconds + self._still_s - still_before):  # noqa: ASYNC110 - a load puts the end off
                    await asyncio.sleep(end - now)
            finally:
                self.decoded_s += max(0.0, seconds - max(0.0, end - clock()))
        versions = self._served[first:]
        return even_spans(versions, max(len(versions), round(seconds * _TOKENS_PER_S)))


class TimedRollouts:
    """Sends each group to its engine and back."""

    def __init__(
        self, engines: Mapping[str, TimedEngine], length_s: Callable[[int], float], costs: Costs
    ) -> None:
        """``length_s``: decoding time of a group, by prompt index; the same in each attempt."""
        self._engines, self._length_s, self._costs = engines, length_s, costs

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, None]:
        await asyncio.sleep(self._costs.call_s)
        spans = await self._engines[task.engine].decode(self._length_s(task.prompt_index))
        await asyncio.sleep(self._costs.call_s)
        return receipt(task, spans), None

    async def close(self) -> None: ...


class TimedTrainer(InstantTrainer):
    """Trainer that serves one call at a time, in the order they were made."""

    def __init__(self, groups_per_step: int, costs: Costs) -> None:
        super().__init__()
        self.trained = list[tuple[int, ...]]()
        """Prompt indices, by step."""
        self.step_s = costs.step_s
        self._open = list[int]()
        self._groups_per_step, self._costs = groups_per_step, costs
        self._turn = asyncio.Lock()

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        groups = len(chunk.prompt_indices)
        cost_s = self._costs.step_s * (1 - FINISH_SHARE) * groups / self._groups_per_step
        await self._serve(cost_s)
        self._open += chunk.prompt_indices
        return ChunkResult(chunk.tokens, groups, 1, cost_s)

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        await self._serve(0.0)

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        await self._serve(self._costs.step_s * FINISH_SHARE)
        self.trained.append(tuple(self._open))
        self._open.clear()
        return await super().finish_train_step(fence, key)

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        await self._serve(self._costs.publish_s)
        return await super().publish_weights(fence, version)

    async def _serve(self, cost_s: float) -> None:
        """Messages travel while an earlier call is served."""
        loop = asyncio.get_running_loop()
        arrives_at = loop.time() + self._costs.call_s
        async with self._turn:
            await asyncio.sleep(max(0.0, arrives_at - loop.time()) + cost_s)
        await asyncio.sleep(self._costs.call_s)
