"""Bugs in which weights are served, and who may be given work."""

import msgspec
from planted.planting import Planted, become

from offbeat.controller.engine_record import EngineRecord, Health
from offbeat.controller.engines import EnginePump
from offbeat.controller.fleet import Fleet
from offbeat.controller.syncing import WeightSync
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.plugins.simulation.schedule import PlannedFault


class AnEngineIsHealthyOnceHeard(Planted):
    """Before it has any weights."""

    breaks = frozenset({"I6"})

    class Engines(Fleet):
        def _reborn(self, engine: EngineRecord, incarnation: str) -> None:
            super()._reborn(engine, incarnation)
            self._become(engine, Health.HEALTHY)

    def plant(self) -> None:
        become(self.state.fleet, self.Engines)


class AnEngineIsReplacedAfterEachSync(Planted):
    """It answers and serves, and is taken for lost as often as the budget allows."""

    breaks = frozenset({"I21"})

    class Engines(EnginePump):
        async def _until_lost(self) -> None:
            pass

        def _can_be_spared(self) -> bool:
            return False

    def plant(self) -> None:
        for pump in self._engine_pumps:
            become(pump, self.Engines)


class ReleasesGoOutWithoutTheirCanary(Planted):
    """An engine that computes other weights than it took is believed."""

    breaks = frozenset({"I6"})
    planned_faults = (
        PlannedFault("load_computes_other", "generator-0", at_step=2),
        PlannedFault("load_computes_other", "generator-1", at_step=4),
    )

    class Sync(WeightSync):
        async def _sync(self, names: list[str], release: WeightRelease) -> list[WeightsAck | None]:
            self._state.sync.release = msgspec.structs.replace(release, canary=None)
            return await super()._sync(names, self._state.sync.release)

    def plant(self) -> None:
        become(self._sync, self.Sync)


class AFailedSyncCountsAsServed(Planted):
    """Whoever was offered a release is believed to serve it."""

    breaks = frozenset({"I6"})
    profile = "engines"

    class Engines(Fleet):
        def stale(self, name: str) -> None:
            engine = self.engines[name]
            if engine.health in (Health.HEALTHY, Health.SUSPECT):
                self._leave(engine)
                engine.version, engine.health = self._newest, Health.HEALTHY
                self._enter(engine)

    def plant(self) -> None:
        become(self.state.fleet, self.Engines)


class AnAbandonedReleaseIsStillServed(Planted):
    """The trainer goes back, and engines that come late still take what it had made before."""

    breaks = frozenset({"I6"})
    profile = "trainer"

    class Sync(WeightSync):
        def forget(self) -> None:
            self._state.sync.requested_version = None

    def plant(self) -> None:
        become(self._sync, self.Sync)
