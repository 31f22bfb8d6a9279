"""The generators' ports for broadcast releases: engines called together receive together.

The members of a broadcast are the engines called in the same turn of the event loop for the same
epoch.

Nothing else differs: the trainer sends to all of them, and they reply one by one, as without a
broadcast.
"""

import asyncio
from collections.abc import Mapping

from offbeat.actors.call import ArgumentLost, reply_of
from offbeat.actors.handles import Handle
from offbeat.actors.ray_ports import RayGenerator, without_chunks
from offbeat.messages.failures import ReleaseLost
from offbeat.messages.fences import Fence
from offbeat.messages.weights import WeightRelease, WeightsAck


def generators_for(transport: str, engines: Mapping[str, Handle]) -> dict[str, RayGenerator]:
    """Create a port for each engine, over a transport of ``sync.transport``."""
    if transport == "reshard":
        return {name: ReshardGenerator(name, engine) for name, engine in engines.items()}
    if transport == "object_store":
        return {name: RayGenerator(name, engine) for name, engine in engines.items()}
    gathering = BroadcastBarrier()
    return {name: BroadcastGenerator(name, engine, gathering) for name, engine in engines.items()}


class ReshardGenerator(RayGenerator):
    """One engine actor that asks every trainer rank for what that rank holds."""

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        content, delta = (release.version, release.digest, release.manifest), release.delta
        if delta is None:
            ref = self._engine.fetch_weights.remote(fence, epoch, *content, *release.chunks)
        else:
            header = without_chunks(delta)
            ref = self._engine.fetch_delta.remote(fence, epoch, *content, header, *delta.chunks)
        try:
            return await reply_of(ref, self.name, "weight sync")
        except ArgumentLost as lost:
            raise ReleaseLost(self.name, release.version, lost.detail) from lost


class BroadcastBarrier:
    """Collects the engines that take part in the same transfer."""

    def __init__(self) -> None:
        self._joined: dict[tuple[int, str], list[str]] = {}
        self._closed: dict[tuple[int, str], asyncio.Future[tuple[str, ...]]] = {}

    async def members(self, epoch: int, name: str, content: str = "") -> tuple[str, ...]:
        """Return all engines that join this epoch in this turn of the event loop, in that order.

        ``content``: digest of what they receive; those that receive another content are apart.
        """
        key = epoch, content
        if key not in self._joined:
            loop = asyncio.get_running_loop()
            self._joined[key], self._closed[key] = [], loop.create_future()
            loop.call_soon(self._close, key)
        self._joined[key].append(name)
        return await asyncio.shield(self._closed[key])

    def _close(self, key: tuple[int, str]) -> None:
        self._closed.pop(key).set_result(tuple(self._joined.pop(key)))


class BroadcastGenerator(RayGenerator):
    """One engine actor that receives releases together with others."""

    def __init__(self, name: str, engine: Handle, gathering: BroadcastBarrier) -> None:
        super().__init__(name, engine)
        self._gathering = gathering

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        content, delta = (release.version, release.digest, release.manifest), release.delta
        sent = release.digest if delta is None else delta.digest
        members = await self._gathering.members(epoch, self.name, sent)
        if delta is None:
            ref = self._engine.receive_weights.remote(
                fence, epoch, *content, *release.chunks, members
            )
        else:
            header = without_chunks(delta)
            ref = self._engine.receive_delta.remote(
                fence, epoch, *content, header, *delta.chunks, members
            )
        return await reply_of(ref, self.name, "weight sync")
