"""The ports of an evaluation without a trainer: engines serve the weights that they loaded."""

import asyncio
from collections.abc import Mapping
from typing import NoReturn

from offbeat.actors.call import reply_of
from offbeat.actors.handles import Handle
from offbeat.actors.ray_ports import RayGenerator
from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.weight_sync.served import loaded_digest


class NoTrainer:
    """Trainer of a run that trains nothing: it has version 0, and its release travels nowhere."""

    def __init__(self, model_path: str) -> None:
        self._path = model_path

    async def state(self, fence: Fence) -> TrainerState:
        del fence
        digest = await self._digest()
        return TrainerState(1, 0, 0, 0, 0, digest, incarnation="loaded", initial_digest=digest)

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        del fence
        return WeightRelease(version, await self._digest(), manifest=None, chunks=(), nbytes=0)

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        del at_most
        return await self.state(fence)

    async def restart(self) -> None:
        """Do nothing: there is no process."""

    async def close(self) -> None:
        """Do nothing: there is no process."""

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        """Do nothing: no step is open."""

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        del fence, chunk, loss
        self._refuse("prepare_logprobs")

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        del fence, key, loss
        self._refuse("begin_train_step")

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        del fence, key, chunk
        self._refuse("train_microbatch")

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        del fence, key
        self._refuse("finish_train_step")

    async def save(self, fence: Fence, step: int) -> None:
        del fence, step
        self._refuse("save")

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        del fence, version
        self._refuse("save_checkpoint")

    async def _digest(self) -> str:
        return await asyncio.get_running_loop().run_in_executor(None, loaded_digest, self._path)

    def _refuse(self, call: str) -> NoReturn:
        raise NotImplementedError(f"{call}: an evaluation trains nothing, and saves nothing")


class LoadedGenerator(RayGenerator):
    """Port of an engine that serves what it loaded when its process began."""

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        ref = self._engine.serve_loaded.remote(fence, epoch, release.version)
        return await reply_of(ref, self.name, "serve loaded weights")


def loaded_generators(engines: Mapping[str, Handle]) -> dict[str, RayGenerator]:
    """Create the port of each engine."""
    return {name: LoadedGenerator(name, engine) for name, engine in engines.items()}
