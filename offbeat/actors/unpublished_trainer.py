"""Trainer port of a run without engines, which take no weights."""

from offbeat.actors.ray_trainer import RayTrainer
from offbeat.generators.rows import make_empty_release
from offbeat.messages.fences import Fence
from offbeat.messages.weights import WeightRelease


class UnpublishedTrainer(RayTrainer):
    """Port of the trainer ranks in a run whose weights nobody takes."""

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        """Return an empty release of the version; no rank is called."""
        del fence
        return make_empty_release(version)
