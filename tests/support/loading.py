"""Loads releases into engine servers of this process as the controller's port does."""

from typing import Any, Final

import msgspec

from offbeat.generators.engine_server import EngineServer
from offbeat.messages.fences import Fence
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.weight_sync.transport import PublishedRelease, make_release

FENCE: Final = Fence("run", 1)


async def load(
    server: EngineServer, epoch: int, release: WeightRelease, fence: Fence = FENCE
) -> WeightsAck:
    """Load a release, by its delta if it has one."""
    return await server.load(fence, epoch, release.without_handles(), *release.handles)


async def load_full(server: EngineServer, epoch: int, release: WeightRelease) -> WeightsAck:
    """Load a release by its own chunks."""
    return await load(server, epoch, msgspec.structs.replace(release, delta=None))


def released(version: int, published: PublishedRelease) -> WeightRelease:
    """Return a release of a sender in this process, whose handles were not sent separately."""
    changes: tuple[Any, ...] = () if published.delta is None else published.delta.chunks
    return make_release(version, published, (*published.handles, *changes), len(changes))
