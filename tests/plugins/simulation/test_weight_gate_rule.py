"""Episodes whose engines decode with the trainer's own weights."""

import pytest

from offbeat.config.run import RunConfig
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.draws import draw_plan
from offbeat.plugins.simulation.episode import run_episode
from offbeat.plugins.simulation.records import Decoded, WeightsChanging, WeightsUnchanged

BASE = RunConfig.model_validate(
    {"model": {"path": "none"}, "steps": 12, "generator": {"share_weights": True}}
)


@pytest.mark.parametrize("profile", ["none", "trainer", "all"])
def test_decode_steps_and_optimizer_steps_take_turns_under_all_faults(profile: str) -> None:
    kinds = set[type]()
    for seed in range(12):
        result = run_episode(seed, BASE, profile=profile)
        assert violations_of(result) == []
        kinds |= set(map(type, result.records))
    assert {Decoded, WeightsChanging} <= kinds
    assert (WeightsUnchanged in kinds) == (profile != "none")


def test_an_episode_has_no_settings_that_need_copies() -> None:
    for seed in range(30):
        config = draw_plan(seed, BASE, "all", None).config
        assert config.sampler.max_staleness == 0
        assert config.sync.interval == 1
        assert not config.sync.delta
        assert not config.sync.ranks_send
