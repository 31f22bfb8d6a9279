"""Ports that answer at once: what is left is the controller's own work."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
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

SAMPLES = 8


class NoopPrompts:
    def prompt(self, ordinal: int) -> Prompt | None:
        return Prompt(ordinal, 0, ordinal, {})


class NoopGenerator:
    """Takes any weights at once."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, -1

    async def state(self, fence: Fence) -> EngineState:
        return EngineState(self.name, "life", self.version, "", 0, 0, 0.0, 0)

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        self.version = release.version
        return WeightsAck(self.name, "life", epoch, release.version, release.digest, 0.0, 0.0)

    async def restart(self) -> None: ...
    async def close(self) -> None: ...


class NoopRollouts:
    """Finishes every group within one turn of the event loop."""

    def __init__(self, generators: Mapping[str, NoopGenerator]) -> None:
        self._generators = generators
        self.in_flight = self.peak_in_flight = 0

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        version = self._generators[task.engine].version
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        n = task.samples
        receipt = Receipt(
            ordinal=task.ordinal,
            attempt=task.attempt,
            engine=task.engine,
            engine_incarnation="life",
            rewards=(0.0, 1.0) * (n // 2),
            prompt_tokens=(64,) * n,
            response_tokens=(512,) * n,
            valid_tokens=(512,) * n,
            finish_reasons=("stop",) * n,
            version_spans=(((version, 512),),) * n,
            columns=("prompt_ids", "response_ids"),
            payload_bytes=40_000,
        )
        return receipt, None

    async def close(self) -> None: ...


class NoopTrainer:
    def __init__(self) -> None:
        self.version = 0

    async def state(self, fence: Fence) -> TrainerState:
        return TrainerState(1, self.version, self.version, 0, 0, "")

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        n = len(chunk.ordinals)
        return PreparedColumns(("policy_logprobs",), (8,) * n, (None,) * n)

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None: ...
    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        return ChunkResult(1, 1, 1, 0.0)

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        self.version += 1
        return StepResult(True, 0.0, 1.0, 1e-6, 1, 1, 1, {})

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None: ...
    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        return WeightRelease(version, f"digest-{version}", None, (), 0)

    async def save(self, fence: Fence, step: int) -> None: ...
    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        return Checkpoint(version, f"digest-{version}", 0, 0.0)

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        return await self.state(fence)

    async def restart(self) -> None: ...
    async def close(self) -> None: ...


class StepClock:
    """Telemetry that notes when each step was over."""

    def __init__(self) -> None:
        self.at = list[float]()

    def emit(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self.at.append(asyncio.get_running_loop().time())


def names(engines: int) -> Sequence[str]:
    return [f"generator-{index}" for index in range(engines)]
