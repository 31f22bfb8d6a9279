"""Bugs in which base a delta is applied to."""

from typing import Any, ClassVar

from planted.planting import Planted, become

from offbeat.controller.controller import Controller
from offbeat.controller.syncing import DeltaOffers
from offbeat.messages.weights import WeightDelta, WeightRelease
from offbeat.plugins.simulation.engine import FakeEngine

SETTINGS: dict[str, dict[str, Any]] = {"sync": {"delta": True, "canary_interval": 0}}
LIMITS: dict[str, Any] = {"chunk_mib": 16.0, "slowest_mib_s": 1000.0, "slack_s": 0.75}


class EverybodyIsOffered(DeltaOffers):
    """Offers whatever there is, to engines of any base."""

    def offer(self, name: str, incarnation: str, release: WeightRelease) -> WeightRelease:
        if release.delta is None or name in self._refused:
            return super().offer(name, incarnation, release)
        return release


class TrustingEngine(FakeEngine):
    """Applies a delta to whatever it has."""

    def _check_base(self, release: WeightRelease, delta: WeightDelta) -> None:
        del release, delta


class ABaseIsNotCompared(Planted):
    """Neither the controller nor the engine compares the base of a delta."""

    breaks = frozenset({"I6"})
    profile = "engines"
    settings: ClassVar = SETTINGS

    def plant(self) -> None:
        plant_engines(self, TrustingEngine)
        become(self._sync.deltas, EverybodyIsOffered)


class ABaseIsNotComparedByAFetch(ABaseIsNotCompared):
    """The same, of changes that every trainer rank sends of what it holds."""

    settings: ClassVar = {"sync": {"transport": "reshard", **LIMITS, **SETTINGS["sync"]}}


def plant_engines(controller: Controller, broken: type[FakeEngine]) -> None:
    """Break every fake engine: they outlive the controllers that reach them through ports."""
    ports: dict[str, object] = vars(vars(controller)["_sync"])["_generators"]
    for port in ports.values():
        become(vars(port)["_engine"], broken)
