"""Engines whose probes succeed and whose requests fail. Cases of NeMo-RL, issue 3590."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat.controller.events import Dispatched, Dropped
from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from tests.support.fakes import FakeGenerator, FakeRollouts, infrastructure
from tests.support.scenarios import aborted_generation, play, use_rollouts
from tests.support.world import World

REASONS = ["engine_unavailable", "engine_lost", "engine_answer", "generation_aborted"]


@dataclass
class RefusedRollouts(FakeRollouts):
    """Requests to the engine ``refusing`` fail at once with ``reason``; its probes and syncs succeed."""

    engines: Mapping[str, FakeGenerator] = field(default_factory=dict[str, FakeGenerator])
    refusing: str = "generator-1"
    reason: str = "engine_answer"
    refused: int = 0

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        if task.engine == self.refusing and self.engines[self.refusing].version is not None:
            await asyncio.sleep(0.01)
            self.refused += 1
            raise infrastructure(task, self.reason)
        return await super().rollout(fence, task)


@pytest.mark.parametrize("reason", REASONS)
def test_an_engine_that_fails_every_request_at_once_does_not_get_most_of_the_work(
    reason: str,
) -> None:
    """It has the least groups in flight at every moment."""
    world = World({"generator": {"restart_budget": 1000, "retire_after": 1000}})
    rollouts = use_rollouts(world, RefusedRollouts(world.generators, reason=reason))
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    assert rollouts.refused < 100


@pytest.mark.parametrize("reason", REASONS)
def test_one_bad_engine_of_eight_is_retired_and_costs_no_prompt(reason: str) -> None:
    world = World({"steps": 40}, engines=8)
    rollouts = use_rollouts(world, RefusedRollouts(world.generators, reason=reason))
    play(world)
    world.assert_ledger_agrees()
    assert world.built.state.fleet.retired == ["generator-1"]
    assert not world.events(Dropped)
    assert rollouts.refused <= 3 * (world.config.generator.retire_after + 1) + 8


def test_a_retry_goes_to_another_engine_when_one_serves() -> None:
    world = World(engines=3)
    world.rollouts.faults = {
        prompt_index: [aborted_generation(prompt_index)] for prompt_index in range(0, 40, 5)
    }
    play(world)
    engines = dict[int, list[str]]()
    for event in world.events(Dispatched):
        engines.setdefault(event.prompt_index, []).append(event.engine)
    retried = [names for names in engines.values() if len(names) > 1]
    assert len(retried) == 8
    assert all(names[0] != names[1] for names in retried)


def test_a_retry_goes_to_the_same_engine_when_no_other_one_serves() -> None:
    world = World(engines=1)
    world.rollouts.faults = {
        prompt_index: [aborted_generation(prompt_index)] for prompt_index in range(0, 40, 9)
    }
    play(world)
    assert len(world.trained) == 40


def test_a_failure_of_the_environment_is_not_held_against_the_engine() -> None:
    world = World({"generator": {"request_strikes": 1}})
    world.rollouts.faults = {
        prompt_index: [
            RolloutFailed(
                FailureKind.INFRASTRUCTURE,
                prompt_index,
                1,
                "sandbox_unavailable",
                "503",
                Component.ENVIRONMENT,
            )
        ]
        for prompt_index in range(20)
    }
    play(world)
    assert [engine.restarts for engine in world.generators.values()] == [0, 0]
