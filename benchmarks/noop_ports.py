"""Ports that answer at once: what is left is the controller's own work."""
# ruff: noqa: ARG002 - a port takes what it is handed, and these look at little of it

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from offbeat.config.loss_spec import LossSpec
from offbeat.controller.steps_after import StepsAfter
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

SAMPLES = 8


class NoJournal:
    """Keeps nothing, and nothing has to be waited for."""

    def append(self, event: msgspec.Struct) -> None: ...
    async def barrier(self) -> None: ...
    async def steps_after(self, version: int) -> StepsAfter:
        return StepsAfter((), ())


class NoopPrompts:
    """Never at its end."""

    def prompt(self, prompt_index: int) -> Prompt | None:
        return Prompt(prompt_index, 0, prompt_index, {})


class NoopGenerator:
    """Takes any weights at once."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, -1

    async def state(self, fence: Fence) -> EngineState:
        return EngineState(self.name, "incarnation", self.version, "", 0, 0, 0.0, 0)

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        self.version = release.version
        return WeightsAck(
            self.name, "incarnation", epoch, release.version, release.digest, 0.0, 0.0
        )

    async def restart(self) -> None: ...
    async def retire(self) -> None: ...
    async def close(self) -> None: ...


class NoopRollouts:
    """Finishes every group within one turn of the event loop."""

    def __init__(self, generators: Mapping[str, NoopGenerator]) -> None:
        self._generators = generators
        self.in_flight = self.peak_in_flight = 0

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, None]:
        version = self._generators[task.engine].version
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return receipt(task, ((version, 512),)), None

    async def close(self) -> None: ...


class NoopTrainer:
    """Trainer that applies every step at once."""

    def __init__(self) -> None:
        self.version = 0

    async def state(self, fence: Fence) -> TrainerState:
        return TrainerState(1, self.version, self.version, 0, 0, "")

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        n = len(chunk.prompt_indices)
        return PreparedColumns(("policy_logprobs",), (8,) * n, (None,) * n)

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None: ...
    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        return ChunkResult(1, 1, 1, 0.0)

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        self.version += 1
        return StepResult(
            applied=True,
            loss=0.0,
            grad_norm=1.0,
            learning_rate=1e-6,
            tokens=1,
            sequences=1,
            chunks=1,
            metrics={},
        )

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None: ...
    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        return WeightRelease(version, f"digest-{version}", None, (), 0)

    async def save(self, fence: Fence, step: int) -> None: ...
    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        return Checkpoint(version, f"digest-{version}", 0)

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        return await self.state(fence)

    async def restart(self) -> None: ...
    async def close(self) -> None: ...


class StepClock:
    """Telemetry that calls back at the end of each step, with its metrics."""

    def __init__(self, on_step: Callable[[Mapping[str, float]], None]) -> None:
        self._on_step = on_step

    def emit(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._on_step(metrics)


def names(engines: int) -> list[str]:
    """Return the names of so many engines."""
    return [f"generator-{index}" for index in range(engines)]


def receipt(task: RolloutTask, spans: VersionSpans) -> Receipt:
    """A finished group whose samples all have the same response."""
    n, tokens = task.samples, sum(count for _, count in spans)
    return Receipt(
        prompt_index=task.prompt_index,
        attempt=task.attempt,
        engine=task.engine,
        engine_incarnation="incarnation",
        rewards=(0.0, 1.0) * (n // 2),
        prompt_tokens=(64,) * n,
        response_tokens=(tokens,) * n,
        valid_tokens=(tokens,) * n,
        finish_reasons=("stop",) * n,
        version_spans=(spans,) * n,
        columns=("prompt_ids", "response_ids"),
        payload_bytes=40_000,
        sampling=task.sampling,
    )
