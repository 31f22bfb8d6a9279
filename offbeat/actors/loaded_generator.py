"""Engine ports of an evaluation: engines serve the weights that they loaded at their start."""

from collections.abc import Mapping

from offbeat.actors.call import reply_of
from offbeat.actors.handles import Handle
from offbeat.actors.ray_ports import RayGenerator
from offbeat.messages.fences import Fence
from offbeat.messages.weights import WeightRelease, WeightsAck


class LoadedGenerator(RayGenerator):
    """Port of an engine that serves what it loaded when its process began."""

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        ref = self._engine.serve_loaded.remote(fence, epoch, release.version)
        return await reply_of(ref, self.name, "serve loaded weights")


def make_loaded_generators(engines: Mapping[str, Handle]) -> dict[str, RayGenerator]:
    """Create the port of each engine."""
    return {name: LoadedGenerator(name, engine) for name, engine in engines.items()}
