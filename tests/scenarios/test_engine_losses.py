"""Engines that die, pause, or serve badly, in whole runs. Cases of NeMo-RL's chaos test of a fleet."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat.controller.commands import Pause, Resume
from offbeat.controller.errors import RunFailed
from offbeat.controller.events import Served
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from tests.support.fakes import FakeRollouts
from tests.support.scenarios import (
    SAMPLERS,
    EngineOfALostNode,
    outcome,
    play,
    use_engine,
    use_rollouts,
)
from tests.support.world import World

Service = tuple[str, str, int | None, str | None]
"""Engine, process incarnation, version and digest."""


@dataclass
class RecordingRollouts(FakeRollouts):
    """Records what every engine serves at the moment a request reaches it."""

    served: list[Service] = field(default_factory=list[Service])

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        engine = self.engines[task.engine]
        if not engine.dead:
            self.served.append((engine.name, engine.incarnation, engine.version, engine.digest))
        return await super().rollout(fence, task)


@pytest.mark.parametrize("moment_s", [0.2, 0.7, 3.3, 5.0, 6.1])
def test_losing_the_only_engine_for_good_ends_the_run_soon_and_by_name(moment_s: float) -> None:
    world = World(engines=1)
    engine = use_engine(world, EngineOfALostNode("generator-0"))
    error, at_s = outcome(world, (moment_s, engine.die))
    assert isinstance(error, RunFailed)
    assert "generator-0" in str(error)
    assert at_s < world.config.generator.start_deadline_s + 40


def test_the_death_of_an_idle_engine_is_noticed() -> None:
    world = World(engines=1)
    play(
        world,
        (4.0, lambda: world.built.control(Pause())),
        (60.0, world.generators["generator-0"].die),
        (80.0, lambda: world.built.control(Resume())),
    )
    world.assert_books_agree()
    assert world.generators["generator-0"].life == 2


@pytest.mark.parametrize("mode", ["keep", "drain"])
@pytest.mark.parametrize("seed", range(12))
def test_no_engine_serves_what_no_sync_has_given_it(seed: int, mode: str) -> None:
    rng = random.Random(seed)
    config = {"steps": 12, "sync": {"mode": mode}, "generator": {"restart_budget": 99}}
    world = World(config, engines=3)
    rollouts = use_rollouts(world, RecordingRollouts(world.generators))
    engines = list(world.generators.values())
    for engine in engines:
        engine.load_s = rng.choice([0.1, 0.8, 2.5])
    play(world, *((rng.uniform(0.5, 40), rng.choice(engines).die) for _ in range(8)))
    world.assert_books_agree()
    acked = {
        (each.engine, each.incarnation, each.version, each.digest) for each in world.events(Served)
    }
    assert {each for each in rollouts.served if each[2] is not None} <= acked


@pytest.mark.parametrize("name", ["ready_first", "in_order"])
@pytest.mark.parametrize("tenths", range(60, 100, 3))
def test_a_death_around_a_drained_sync_leaves_the_gate_open(name: str, tenths: int) -> None:
    world = World({"sync": {"mode": "drain"}, "sampler": SAMPLERS[name]}, engines=2)
    first, second = world.generators.values()
    first.load_s = 1.5
    play(world, (tenths / 10, first.die), (tenths / 10 + 0.4, second.die))
    world.assert_books_agree()
    assert len(world.trained) == 40


def test_a_failed_sync_moves_no_version_backwards_and_the_others_serve() -> None:
    world = World({"generator": {"restart_budget": 99}}, engines=3)
    world.generators["generator-2"].refuse_loads = 2
    play(world)
    world.assert_books_agree()
    assert {engine.version for engine in world.generators.values()} == {10}
