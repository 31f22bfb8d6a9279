"""The trainer's port over a real actor: killed in every way, it comes back and is restored."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray

from offbeat.actors.ray_trainer import RayTrainer
from offbeat.actors.trainer_actor import StubTrainerActor
from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence
from offbeat.messages.training import TrainerState
from offbeat.trainers.spec import TrainerSpec

FENCE = Fence("run", 1)


async def up(trainer: RayTrainer) -> TrainerState:
    async with asyncio.timeout(240):
        while True:
            try:
                return await trainer.state(FENCE)
            except ActorLost:
                await asyncio.sleep(0.05)  # a real process is starting


def version_and_digest(state: TrainerState) -> tuple[int, str]:
    """What the process holds, whichever process it is."""
    return state.version, state.digest


@pytest.mark.usefixtures("local_ray")
def test_a_rank_that_was_killed_comes_back_and_is_restored(tmp_path: Path) -> None:
    config = RunConfig(steps=5, model=ModelConfig(path="m"))
    options = {"num_cpus": 0, "max_restarts": -1}
    rank = (
        ray.remote(StubTrainerActor).options(**options).remote(TrainerSpec(config, str(tmp_path)))
    )

    async def process() -> int:
        incarnation, *_ = await rank.about.remote(FENCE)
        return int(incarnation.split("-")[-2])

    async def story() -> None:
        trainer = RayTrainer([rank])
        initial = version_and_digest(await up(trainer))
        kept = await trainer.save_checkpoint(FENCE, 0)
        assert kept.digest == initial[-1]
        pids = [await process()]
        for stopped in (False, True):
            if stopped:
                os.kill(pids[-1], signal.SIGSTOP)
            await trainer.restart()
            assert version_and_digest(await up(trainer)) == initial
            pids.append(await process())
        os.kill(pids[-1], signal.SIGKILL)
        with pytest.raises(ActorLost):
            await trainer.restore(FENCE, 0)
        assert version_and_digest(await up(trainer)) == initial
        assert version_and_digest(await trainer.restore(FENCE, 0)) == initial
        assert (await trainer.publish_weights(FENCE, 0)).version == 0
        pids.append(await process())
        assert len(set(pids)) == 4
        await trainer.close()

    asyncio.run(story())
