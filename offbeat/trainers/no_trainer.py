"""Trainer port of an evaluation. Its engines serve the weights of the model files."""

import asyncio
from typing import NoReturn

from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import TrainerState
from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.served import digest_loaded


class NoTrainer:
    """Trainer of a run that trains nothing. Its version is 0, and no engine fetches its release."""

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
        """Do nothing, because no process runs."""

    async def close(self) -> None:
        """Do nothing, because no process runs."""

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        """Do nothing, because no step is open."""

    async def _digest(self) -> str:
        return await asyncio.get_running_loop().run_in_executor(None, digest_loaded, self._path)

    async def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        del args, kwargs
        raise NotImplementedError("an evaluation trains nothing, and saves nothing")

    prepare_logprobs = begin_train_step = train_microbatch = finish_train_step = _refuse
    save = save_checkpoint = _refuse
