"""The fleet under random news, in the orders that the controller can hear them."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.controller.fleet import Fleet, Health
from offbeat.messages.weights import EngineState, WeightsAck

NAMES = ("generator-0", "generator-1", "generator-2")
NAME = st.sampled_from(NAMES)


def state(name: str, life: int, version: int | None = None, tokens: int = 0) -> EngineState:
    return EngineState(name, f"{name}-life-{life}", version, None, 0, 0, tokens / 10, tokens)


def ack(name: str, life: int, version: int) -> WeightsAck:
    return WeightsAck(name, f"{name}-life-{life}", 1, version, "digest", 0.1, 0.1)


class FleetNews(RuleBasedStateMachine):
    """Acks are of the newest release, as the sync pump's lock sees to; all else is arbitrary."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(NAMES)
        self.life: dict[str, int] = dict.fromkeys(NAMES, 1)
        self.released = 0
        self.acked = set[tuple[str, str]]()  # (engine, incarnation) that completed a sync
        self.before = (set[str](), 0)  # who served, and what

    @rule()
    def release(self) -> None:
        self.released += 1

    @rule(name=NAME, version=st.none() | st.integers(0, 5))
    def hear(self, name: str, version: int | None) -> None:
        engine = self.fleet.engines[name]
        incarnation, was = engine.incarnation, engine.health
        self.fleet.heard(state(name, self.life[name], version))
        if engine.health is Health.HEALTHY and was is not Health.HEALTHY:
            assert was is Health.SUSPECT
            assert engine.incarnation == incarnation
            assert engine.version == version

    @rule(name=NAME)
    def start_a_new_life(self, name: str) -> None:
        self.life[name] += 1

    @rule(name=NAME)
    def ack_the_release(self, name: str) -> None:
        engine = self.fleet.engines[name]
        may = engine.health not in (Health.DEAD, Health.RESTARTING)
        alive = engine.incarnation == f"{name}-life-{self.life[name]}"
        assert self.fleet.acked(ack(name, self.life[name], self.released)) == (may and alive)
        if may and alive:
            self.acked.add((name, engine.incarnation))
            assert engine.health is Health.HEALTHY

    @precondition(lambda self: any(life > 1 for life in self.life.values()))
    @rule(name=NAME)
    def ack_of_a_former_life_changes_nothing(self, name: str) -> None:
        engine = self.fleet.engines[name]
        former = self.life[name] - 1
        if engine.incarnation == f"{name}-life-{former}":
            return
        before = repr(engine)
        assert not self.fleet.acked(ack(name, former, self.released))
        assert repr(engine) == before

    @rule(name=NAME)
    def suspect(self, name: str) -> None:
        self.fleet.suspect(name)
        assert self.fleet.engines[name].health is not Health.HEALTHY

    @rule(name=NAME)
    def fail_a_sync(self, name: str) -> None:
        self.fleet.stale(name)
        assert self.fleet.engines[name].health is not Health.HEALTHY

    @rule(name=NAME)
    def lose(self, name: str) -> None:
        self.fleet.dead(name)

    @rule(name=NAME)
    def restart(self, name: str) -> None:
        self.fleet.restarting(name)

    @rule(name=NAME)
    def give_work(self, name: str) -> None:
        self.fleet.took(name)

    @rule(name=NAME)
    def take_back(self, name: str) -> None:
        if self.fleet.engines[name].outstanding:
            self.fleet.gave_back(name)

    @invariant()
    def who_serves_has_acked_in_this_life(self) -> None:
        for engine in self.fleet.serving:
            assert (engine.name, engine.incarnation) in self.acked
            assert engine.version >= 0

    @invariant()
    def the_serving_version_is_the_lowest_that_is_served(self) -> None:
        versions = [engine.version for engine in self.fleet.serving]
        now = self.fleet.serving_version
        assert now == min(versions, default=now)
        assert now <= self.released

    @invariant()
    def the_serving_version_falls_only_when_an_engine_joins(self) -> None:
        """A suspect that is cleared may still serve the version before; its groups say so."""
        serving, now = {engine.name for engine in self.fleet.serving}, self.fleet.serving_version
        served, version = self.before
        assert now >= version or serving - served
        self.before = serving, now

    @invariant()
    def the_one_picked_serves_and_has_the_least_to_do(self) -> None:
        picked, serving = self.fleet.pick(), self.fleet.serving
        assert (picked is None) == (not serving)
        if picked is not None:
            assert picked.health is Health.HEALTHY
            assert picked.outstanding == min(engine.outstanding for engine in serving)

    @invariant()
    def whom_we_never_heard_of_takes_part_in_no_sync(self) -> None:
        for name in self.fleet.in_sync_set():
            assert self.fleet.engines[name].health not in (Health.DEAD, Health.RESTARTING)


TestFleetNews = FleetNews.TestCase


def synced(*versions: int) -> Fleet:
    fleet = Fleet(NAMES[: len(versions)])
    for name, version in zip(NAMES, versions, strict=False):
        fleet.heard(state(name, 1))
        assert fleet.acked(ack(name, 1, version))
    return fleet


def test_the_serving_version_rises_with_the_last_of_the_serving_engines() -> None:
    fleet = synced(1, 1)
    assert fleet.acked(ack("generator-0", 1, 2))
    assert fleet.serving_version == 1
    assert fleet.acked(ack("generator-1", 1, 2))
    assert fleet.serving_version == 2


def test_the_serving_version_never_falls_when_all_engines_are_lost() -> None:
    fleet = synced(4)
    fleet.dead("generator-0")
    assert fleet.serving_version == 4
    assert fleet.pick() is None


def test_an_engine_left_behind_holds_the_others_back_only_while_it_serves() -> None:
    fleet = synced(3, 3)
    fleet.acked(ack("generator-1", 1, 4))
    assert fleet.serving_version == 3
    fleet.stale("generator-0")
    assert fleet.serving_version == 4


@pytest.mark.parametrize("says", [None, 0, 2])
def test_a_suspect_that_serves_something_else_than_it_acked_has_to_sync_again(
    says: int | None,
) -> None:
    fleet = synced(1)
    fleet.suspect("generator-0")
    fleet.heard(state("generator-0", 1, says))
    assert fleet.engines["generator-0"].health is Health.STALE


def test_a_new_life_is_stale_whatever_it_says_and_counts_as_a_restart() -> None:
    fleet = synced(1)
    fleet.heard(state("generator-0", 2, version=1))
    assert fleet.engines["generator-0"].health is Health.STALE
    assert fleet.restarts == 1
    assert not fleet.acked(ack("generator-0", 1, 2)), "the ack of the life before comes too late"


def test_what_an_engine_did_adds_up_over_its_lives() -> None:
    fleet = Fleet(["generator-0"])
    for life, tokens in ((1, 10), (1, 25), (2, 5), (2, 5)):
        fleet.heard(state("generator-0", life, tokens=tokens))
    assert fleet.engines["generator-0"].tokens == 30
    assert fleet.engines["generator-0"].busy_s == pytest.approx(3.0)
