"""Environments that are out of service for a while. Cases of prime-rl and NeMo-Gym."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat.controller.events import Dropped, Returned
from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from tests.support.fakes import FakeGenerator, FakeRollouts
from tests.support.scenarios import SAMPLERS, outcome, play, use_rollouts
from tests.support.world import World


@dataclass
class OutOfService(FakeRollouts):
    """Environment workers whose environment fails every rollout between two moments."""

    engines: dict[str, FakeGenerator] = field(default_factory=dict[str, FakeGenerator])
    kind: FailureKind = FailureKind.INFRASTRUCTURE
    reason: str = "environment_unavailable"
    from_s: float = 10.0
    until_s: float = 40.0

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        if self.from_s <= asyncio.get_running_loop().time() < self.until_s:
            await asyncio.sleep(0.1)
            source = Component.ENVIRONMENT
            raise RolloutFailed(
                self.kind,
                task.prompt_index,
                task.attempt,
                self.reason,
                "the service is down",
                source,
            )
        return await super().rollout(fence, task)


def test_an_environment_that_says_it_is_unavailable_costs_no_prompt_and_no_engine() -> None:
    world = World({"steps": 40})
    use_rollouts(world, OutOfService(world.generators))
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trained) == 160
    assert not world.built.state.ledger.totals.dropped
    assert sum(engine.restarts for engine in world.generators.values()) == 0


@pytest.mark.parametrize("name", ["in_order", "ready_first"])
def test_trials_during_an_outage_cost_no_prompt_its_retries(name: str) -> None:
    """A minute, in which the prompts that are tried would spend two retries several times over."""
    few = {"infrastructure_retries": 2, "infrastructure_drop_budget": 100}
    world = World({"sampler": SAMPLERS[name], "rollout": few, "steps": 40})
    use_rollouts(world, OutOfService(world.generators, until_s=70.0))
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trained) == 160
    assert not world.built.state.ledger.totals.dropped
    outages = [event.prompt_index for event in world.events(Returned) if event.kind == "outage"]
    assert len(set(outages)) > 2, "one prompt after another is tried"


def test_an_outage_is_what_the_status_says_is_waited_for() -> None:
    world = World({"steps": 40})
    seen = list[str]()

    class Watched(OutOfService):
        async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
            seen.append(world.built.progress.status().waiting_for)
            return await super().rollout(fence, task)

    use_rollouts(world, Watched(world.generators, until_s=70.0))
    play(world)
    trials = [each for each in seen if each.startswith("the environment, which failed ")]
    assert any("one group at a time is tried (3 so far)" in each for each in trials)
    assert not world.built.progress.status().waiting_for.startswith("the environment")


def test_an_outage_that_one_prompt_alone_sees_costs_it_nothing() -> None:
    """With one group in flight, its retries are spent before the failures in a row are many."""
    world = World(
        {
            "steps": 3,
            "groups_per_step": 1,
            "sampler": {"name": "in_order", "max_staleness": 0},
            "rollout": {"infrastructure_retries": 1, "infrastructure_drop_budget": 9},
        }
    )
    use_rollouts(world, OutOfService(world.generators, from_s=0.0, until_s=30.0))
    play(world)
    assert world.trained == [0, 1, 2]
    assert not world.built.state.ledger.totals.dropped


def test_an_outage_costs_nothing_to_the_first_prompt_that_sees_it_without_a_retry_left() -> None:
    world = World({"rollout": {"infrastructure_retries": 0}})
    use_rollouts(world, OutOfService(world.generators))
    play(world)
    world.assert_ledger_agrees()
    assert not world.built.state.ledger.totals.dropped


def test_a_prompt_whose_own_environment_never_works_is_dropped() -> None:
    """The others are answered in between, so its failures are not an outage."""
    world = World({"rollout": {"infrastructure_retries": 1, "infrastructure_drop_budget": 1}})
    down = RolloutFailed(
        FailureKind.INFRASTRUCTURE, 0, 1, "environment_unavailable", "down", Component.ENVIRONMENT
    )
    world.rollouts.faults = {0: [down] * 100}
    play(world)
    world.assert_ledger_agrees()
    assert [event.prompt_index for event in world.events(Dropped)] == [0]
    assert len(world.trained) == 40


def test_a_prompt_that_fails_by_itself_does_not_hold_up_what_follows_an_outage() -> None:
    """Others are tried before it is tried again: the first one that is answered ends the outage."""
    world = World({"rollout": {"drop_budget": 1, "data_retries": 8, "outage_failures": 2}})
    bad = RolloutFailed(FailureKind.DATA, 0, 1, "raised", "bad", Component.ENVIRONMENT)
    world.rollouts.faults = {0: [bad] * 100}
    play(world)
    world.assert_ledger_agrees()
    assert [event.prompt_index for event in world.events(Dropped)] == [0]
    assert len(world.trained) == 40


def test_an_outage_that_looks_like_bad_prompts_costs_only_those_it_is_recognised_by() -> None:
    world = World({"rollout": {"drop_budget": 100}, "steps": 40})
    use_rollouts(
        world,
        OutOfService(world.generators, kind=FailureKind.DATA, reason="environment_raised"),
    )
    took_s = play(world)
    world.assert_ledger_agrees()
    dropped = world.built.state.ledger.totals.dropped
    assert sum(dropped.values()) <= world.config.rollout.outage_failures
    assert took_s < 40 * 4 + 30 + 20, "it goes on soon after the outage"


def test_an_environment_that_never_works_ends_the_run_soon_and_by_name() -> None:
    world = World()
    use_rollouts(
        world,
        OutOfService(
            world.generators,
            kind=FailureKind.DATA,
            reason="environment_raised",
            from_s=0.0,
            until_s=math.inf,
        ),
    )
    error, at_s = outcome(world)
    assert error is not None and "rollout.drop_budget" in str(error)
    assert at_s < 20


def test_an_environment_that_stays_unavailable_ends_the_run_by_name() -> None:
    world = World()
    use_rollouts(world, OutOfService(world.generators, from_s=0.0, until_s=math.inf))
    error, at_s = outcome(world)
    assert error is not None and "environment_unavailable" in str(error)
    assert at_s < 1200
