"""Base of engine actors that also take releases as what they change of the one that they serve."""

import time

from offbeat.actors.engine_actor import EngineActor
from offbeat.generators.broadcasts import in_thread
from offbeat.messages.fences import Fence
from offbeat.messages.weights import WeightDelta, WeightsAck
from offbeat.weight_sync.delta import HeldRelease, check_delta, rebuilt
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.transports.messages import ReshardRoute, Route


class DeltaEngineActor(EngineActor):
    """Engine actor that compares the base of a delta with what it serves, and rebuilds the release."""

    async def load_delta(
        self,
        fence: Fence,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        delta: WeightDelta,
        *chunks: Bytes,
    ) -> WeightsAck:
        """Load a release by what it changes of the one that this engine serves.

        Raises:
            BaseRefused: It serves another one. Nothing was begun: the full release may follow.
            WeightSyncFailed: As in ``load_weights``.
        """
        started_s = time.perf_counter()
        base = self._begin_delta(fence, epoch, version, delta)
        return await self._rebuilt(started_s, epoch, version, digest, manifest, base, delta, chunks)

    async def receive_delta(
        self,
        fence: Fence,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        delta: WeightDelta,
        route: Route,
        members: tuple[str, ...],
    ) -> WeightsAck:
        """Receive what a release changes, broadcast to ``members`` together, and load it.

        Raises:
            BaseRefused: As in ``load_delta``.
            ReleaseLost, WeightSyncFailed: As in ``receive_weights``.
        """
        started_s = time.perf_counter()
        base = self._begin_delta(fence, epoch, version, delta)
        with self._transfer(epoch, version):
            chunks = await self._broadcasts.fetch(route, epoch, members, delta.manifest)
        return await self._rebuilt(started_s, epoch, version, digest, manifest, base, delta, chunks)

    async def fetch_delta(
        self,
        fence: Fence,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        delta: WeightDelta,
        route: ReshardRoute,
    ) -> WeightsAck:
        """Fetch what a release changes from the trainer ranks that hold its parts, and load it.

        Raises:
            BaseRefused: As in ``load_delta``.
            ReleaseLost, WeightSyncFailed: As in ``fetch_weights``.
        """
        started_s = time.perf_counter()
        base = self._begin_delta(fence, epoch, version, delta)
        with self._transfer(epoch, version):
            taken = await self._take_parts(epoch, version, digest, manifest, route, delta)
            if taken is not None:
                return self._acked(started_s, epoch, version, digest, manifest, taken)
            parts = await self._broadcasts.fetch_on_host(route, epoch, delta.manifest, manifest)
        return await self._rebuilt(started_s, epoch, version, digest, manifest, base, delta, parts)

    def _begin_delta(
        self, fence: Fence, epoch: int, version: int, delta: WeightDelta
    ) -> HeldRelease:
        """Compare the base with what is served before anything else, and begin the transfer."""
        self._guard.check(fence)
        base = self._kept_base.check(version, delta.base, self._digest)
        self._begin(fence, epoch, version)
        return base

    async def _rebuilt(
        self,
        started_s: float,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        base: HeldRelease,
        delta: WeightDelta,
        parts: tuple[Bytes, ...],
    ) -> WeightsAck:
        """Rebuild the chunks of a release beside decoding, and load them as if they had arrived."""

        def work() -> tuple[Bytes, ...]:
            check_delta(epoch, delta, parts)
            return rebuilt(epoch, base, manifest, parts, self._kept_base.lend)

        with self._transfer(epoch, version):
            chunks = await in_thread(f"delta {epoch}", work)
        return await self._served_from_buckets(started_s, epoch, version, digest, manifest, chunks)
