"""Bugs in whose turn it is to use weights that trainer and engines share."""

from planted.delta_bugs import plant_engines
from planted.planting import Planted

from offbeat.config.run import RunConfig
from offbeat.plugins.simulation.draws import EpisodePlan, draw_plan
from offbeat.plugins.simulation.engine import FakeEngine

BASE = RunConfig.model_validate(
    {"model": {"path": "none"}, "steps": 12, "generator": {"share_weights": True}}
)


class SharingWeights(Planted):
    """A bug of a run with one copy of the weights."""

    @classmethod
    def plan(cls, seed: int) -> EpisodePlan:
        return draw_plan(seed, BASE, cls.profile, None)


class AnEngineDecodesDuringAChange(SharingWeights):
    """It does not stop before the optimizer step."""

    breaks = frozenset({"I25"})

    class Engine(FakeEngine):
        def stop_decoding(self) -> None:
            pass

    def plant(self) -> None:
        plant_engines(self, self.Engine)


class AnEngineGoesOnBeforeItLoads(SharingWeights):
    """It decodes with new weights under the version of the old ones."""

    breaks = frozenset({"I25"})

    class Engine(FakeEngine):
        def stop_decoding(self) -> None:
            super().stop_decoding()
            self.later(0.3, self.continue_decoding)

    def plant(self) -> None:
        plant_engines(self, self.Engine)
