"""Two ranks over real actors cut what they send for the layout of the engines."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from offbeat.actors.ray_trainer import EngineLayouts, RayTrainer
from offbeat.actors.trainer_actor import TorchTrainerActor
from offbeat.config.run import RunConfig
from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.region import Region, union_elements
from tests.support.starting import ROOT

FENCE = Fence("run", 1)
CONFIG = RunConfig.model_validate(
    {
        "steps": 1,
        "model": {"path": str(ROOT / "models" / "tiny-addition")},
        "trainer": {"data_parallel": 2, "step_deadline_s": 200.0},
        "sync": {"transport": "reshard"},
    }
)
EMBEDDING, ROWS, HALF = "model.embed_tokens.weight", 100, 64
LEFT, RIGHT = (Region((0, first), (ROWS, first + HALF)) for first in (0, HALF))
LAYOUT = EngineLayout((EMBEDDING,), (((EMBEDDING, LEFT),), ((EMBEDDING, RIGHT),)))


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)
    yield
    ray.shutdown()


async def up(trainer: RayTrainer) -> None:
    async with asyncio.timeout(250):
        while True:
            try:
                await trainer.state(FENCE)
            except ActorLost:
                await asyncio.sleep(0.1)  # real processes are starting
            else:
                return


def elements_of_halves(manifest: Manifest) -> list[int]:
    """Elements of the embedding that are in regions within one half of its columns."""
    cut = [
        piece.region
        for piece in manifest.pieces
        if manifest.tensors[piece.tensor].name == EMBEDDING
    ]
    return [union_elements(each for each in cut if side.contains(each)) for side in (LEFT, RIGHT)]


@pytest.mark.usefixtures("cluster")
def test_releases_are_cut_for_the_layout_of_the_engines_also_by_ranks_that_were_started_anew(
    tmp_path: Path,
) -> None:
    asked = list[Fence]()

    async def ask(fence: Fence) -> EngineLayout:
        asked.append(fence)
        return LAYOUT

    async def story() -> None:
        cls = ray.remote(TorchTrainerActor).options(num_cpus=0, max_restarts=-1)
        ranks: list[Any] = [cls.remote(TrainerSpec(CONFIG, str(tmp_path), at, 2)) for at in (0, 1)]
        layouts = EngineLayouts({"generator-0": ask}, 10.0)
        trainer = RayTrainer(ranks, CONFIG.trainer, layouts)
        for _ in range(2):
            await up(trainer)
            for _ in range(2):
                release = await trainer.publish_weights(FENCE, 0)
                assert elements_of_halves(release.manifest) == [ROWS * HALF] * 2
            await trainer.restart()
        assert asked == [FENCE], "the layout is kept"

    asyncio.run(story())
