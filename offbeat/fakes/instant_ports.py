"""Ports of the controller that answer at once. Planning adds times to them. Benchmarks do not."""
# ruff: noqa: ARG002 - a port has the arguments of its protocol and ignores most of them

from offbeat.config.loss_spec import LossSpec
from offbeat.fakes.receipts import INCARNATION
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck


class InstantEngine:
    """Engine that serves any release at once."""

    load_s = pause_s = 0.0
    """Seconds that an ack reports."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, -1

    async def state(self, fence: Fence) -> EngineState:
        return EngineState(self.name, INCARNATION, self.version, "", 0, 0, 0.0, 0)

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        self.version = release.version
        return WeightsAck(
            self.name,
            INCARNATION,
            epoch,
            release.version,
            release.digest,
            self.load_s,
            self.pause_s,
        )

    async def restart(self) -> None: ...
    async def retire(self) -> None: ...
    async def close(self) -> None: ...


class InstantTrainer:
    """Trainer that applies every step at once."""

    step_s = 0.0
    """Seconds that the result of a step reports."""

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
            compute_s=self.step_s,
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
