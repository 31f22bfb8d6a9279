"""Episodes in which engines get what a release changes of the one before."""

from collections import Counter
from typing import Any, ClassVar

import msgspec
import pytest
from planted.delta_bugs import plant_engines

from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.controller.controller import Controller
from offbeat.controller.syncing import DeltaOffers
from offbeat.messages.weights import FullReason, WeightDelta, WeightRelease
from offbeat.plugins.delta.kept_release import check_base
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.draws import EpisodePlan, draw_plan
from offbeat.plugins.simulation.engine import FakeEngine
from offbeat.plugins.simulation.episode import play

BASE = RunConfig(model=ModelConfig(path="none"), steps=12)
RESHARD = RunConfig.model_validate({**BASE.model_dump(), "sync": {"transport": "reshard"}})


class Counting(DeltaOffers):
    """Counts what it offers, over all controllers of all episodes."""

    offered: ClassVar = Counter[str]()

    def offer(self, name: str, incarnation: str, release: WeightRelease) -> WeightRelease:
        before = Counter(self._full)
        given = super().offer(name, incarnation, release)
        self.offered.update(["delta"] if given.delta else (self._full - before).elements())
        return given


class CountingController(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync.deltas = Counting(enabled=True)


def with_delta(seed: int, base: RunConfig) -> EpisodePlan:
    plan = draw_plan(seed, base, "all", None)
    sync = plan.config.sync.model_copy(update={"delta": True})
    return msgspec.structs.replace(plan, config=plan.config.model_copy(update={"sync": sync}))


class ForgetfulEngine(FakeEngine):
    """Refuses every base, as one does that restarted unnoticed."""

    def _check_base(self, release: WeightRelease, delta: WeightDelta) -> None:
        check_base(self.name, release.version, delta.base, None)


class ControllerOfTheForgetful(CountingController):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plant_engines(self, ForgetfulEngine)


def offered_in(
    seeds: range, controller: type[CountingController], base: RunConfig = BASE
) -> Counter[str]:
    Counting.offered.clear()
    for seed in seeds:
        assert violations_of(play(seed, with_delta(seed, base), controller)) == []
    return Counting.offered


@pytest.mark.parametrize("base", [BASE, RESHARD], ids=["drawn", "reshard"])
def test_under_all_faults_most_releases_are_deltas_and_nothing_torn_is_served(
    base: RunConfig,
) -> None:
    offered = offered_in(range(6), CountingController, base)
    assert offered["delta"] > offered.total() / 3
    assert {FullReason.NO_BASE, FullReason.TOO_LARGE, FullReason.UNKNOWN_BASE} <= offered.keys()


def test_engines_that_refuse_every_base_get_full_releases_and_serve() -> None:
    offered = offered_in(range(2), ControllerOfTheForgetful)
    assert offered[FullReason.REFUSED] == offered["delta"] > 0


def test_half_of_the_episodes_have_deltas_whatever_carries_them() -> None:
    for base in (BASE, RESHARD):
        drawn = [draw_plan(seed, base, "none", []).config.sync.delta for seed in range(40)]
        assert 10 < sum(drawn) < 30
