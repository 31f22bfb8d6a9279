"""Routing and health of a fleet, by its table alone. Cases of NeMo-RL's ``test_fleet_health``."""

from collections import Counter

import pytest

from offbeat.controller.fleet import Fleet, NothingOutstanding
from offbeat.controller.health import Health, IllegalHealth
from offbeat.messages.weights import EngineState, WeightsAck


def state_of(name: str, incarnation: str = "a", version: int | None = None) -> EngineState:
    return EngineState(name, incarnation, version, None, 0, 0, 0.0, 0)


def ack(name: str, version: int, incarnation: str = "a") -> WeightsAck:
    return WeightsAck(name, incarnation, 1, version, "digest", 0.1, 0.1)


def serving(*names: str) -> Fleet:
    fleet = Fleet(names)
    for name in names:
        assert fleet.probe_answered(state_of(name))
        assert fleet.acked(ack(name, 0))
    return fleet


def test_a_dead_engine_ignores_successful_probes() -> None:
    fleet = serving("g0", "g1")
    fleet.dead("g1")
    assert not any(fleet.probe_answered(state_of("g1", version=0)) for _ in range(5))


def test_only_a_sync_of_the_living_process_restores_service() -> None:
    fleet = serving("g0", "g1")
    fleet.dead("g1")
    fleet.restarting("g1")
    for _ in range(5):
        assert fleet.probe_answered(state_of("g1", "b", version=0))
        assert fleet.engines["g1"].health is Health.STALE
    assert not fleet.acked(ack("g1", 3, "a"))
    assert [engine.name for engine in fleet.serving] == ["g0"]
    assert fleet.acked(ack("g1", 3, "b"))
    assert len(fleet.serving) == 2


def test_a_replacement_inherits_no_failures_of_the_process_before_it() -> None:
    fleet = serving("g0", "g1")
    fleet.request_failed("g1")
    fleet.request_failed("g1")
    fleet.dead("g1")
    fleet.restarting("g1")
    fleet.probe_answered(state_of("g1", "b"))
    assert fleet.acked(ack("g1", 0, "b"))
    assert fleet.engines["g1"].health is Health.HEALTHY
    assert not fleet.request_failed("g1")
    assert not fleet.request_failed("g1", "a")


def test_groups_are_spread_over_the_engines_that_serve() -> None:
    fleet = serving("g0", "g1", "g2")
    took = list[str]()
    for _ in range(6):
        engine = fleet.pick()
        assert engine is not None
        fleet.took(engine.name)
        took.append(engine.name)
    assert Counter(took) == {"g0": 2, "g1": 2, "g2": 2}
    fleet.gave_back("g1")
    assert fleet.pick() is fleet.engines["g1"]
    fleet.dead("g1")
    assert fleet.pick() is not fleet.engines["g1"]


def test_without_a_serving_engine_none_is_picked() -> None:
    fleet = serving("g0", "g1")
    fleet.dead("g0")
    fleet.dead("g1")
    assert fleet.pick() is None


def test_a_group_is_given_back_once() -> None:
    fleet = serving("g0")
    fleet.took("g0")
    fleet.dead("g0")
    fleet.gave_back("g0")
    with pytest.raises(NothingOutstanding):
        fleet.gave_back("g0")


def test_an_engine_that_is_not_given_up_cannot_be_restarting() -> None:
    with pytest.raises(IllegalHealth):
        serving("g0").restarting("g0")


def test_a_suspect_takes_part_in_the_next_sync() -> None:
    fleet = serving("g0", "g1")
    fleet.suspect("g1")
    assert fleet.in_sync_set() == ["g0", "g1"]
