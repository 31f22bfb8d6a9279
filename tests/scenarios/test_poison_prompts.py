"""Prompts that hang or kill whatever they are sent to. Cases of NeMo-RL, issues 3238 and 3665."""

from typing import Any

import pytest

from offbeat.controller.commands import Stop
from offbeat.controller.errors import BudgetSpent, RunFailed
from offbeat.controller.events import Dispatched, Dropped
from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from tests.support.scenarios import (
    SAMPLERS,
    PoisonedRollouts,
    next_incarnation,
    outcome,
    play,
    use_rollouts,
)
from tests.support.world import World

DROPS: dict[str, Any] = {"infrastructure_drop_budget": 3, "deadline_s": 20}


@pytest.mark.parametrize("name", ["in_order", "ready_first", "weight_fifo"])
def test_a_prompt_that_always_hangs_is_dropped_within_the_budget(name: str) -> None:
    world = World({"sampler": SAMPLERS[name], "rollout": DROPS})
    use_rollouts(world, PoisonedRollouts(world.generators, hangs=(6,)))
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    assert [(event.prompt_index, event.detail) for event in world.events(Dropped)] == [
        (6, "deadline")
    ]


def test_a_prompt_that_kills_its_engine_is_dropped_within_the_budget() -> None:
    world = World({"sampler": SAMPLERS["ready_first"], "rollout": DROPS}, engines=3)
    use_rollouts(world, PoisonedRollouts(world.generators, kills=(6,)))
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    assert world.built.state.fleet.retired == []


def test_what_the_data_failures_may_drop_is_what_infrastructure_failures_may_unless_told() -> None:
    world = World({"rollout": {"drop_budget": 1, "deadline_s": 20}})
    use_rollouts(world, PoisonedRollouts(world.generators, hangs=(6,)))
    play(world)
    totals = world.built.state.ledger.totals
    assert (totals.failed_prompts, totals.failed_prompts_infrastructure) == (0, 1)


def test_one_prompt_more_than_the_budget_ends_the_run_by_name() -> None:
    world = World({"rollout": {"infrastructure_drop_budget": 1, "deadline_s": 20}})
    use_rollouts(world, PoisonedRollouts(world.generators, hangs=(6, 9)))
    error, _ = outcome(world)
    assert isinstance(error, RunFailed)
    assert isinstance(error.causes[0], BudgetSpent)
    assert "rollout.infrastructure_drop_budget" in str(error)
    assert len(world.events(Dropped)) == 1


def test_without_a_budget_the_run_ends_and_names_both_ways_out() -> None:
    world = World({"rollout": {"deadline_s": 20}})
    use_rollouts(world, PoisonedRollouts(world.generators, hangs=(6,)))
    error, _ = outcome(world)
    assert isinstance(error, RunFailed)
    assert "retries of g-000006" in str(error)
    assert "rollout.infrastructure_drop_budget" in str(error)


def test_a_resumed_run_with_a_budget_gets_past_the_prompt_that_ended_it() -> None:
    """The attempts of the former controller count: one more, and the prompt is dropped."""
    before = World({"sampler": SAMPLERS["in_order"], "rollout": {"deadline_s": 20}})
    use_rollouts(before, PoisonedRollouts(before.generators, hangs=(6,)))
    error, _ = outcome(before)
    assert error is not None
    world = next_incarnation(before, {"sampler": SAMPLERS["in_order"], "rollout": DROPS})
    use_rollouts(world, PoisonedRollouts(world.generators, hangs=(6,)))
    play(world)
    world.assert_ledger_agrees()
    later = world.events(Dispatched)[len(before.events(Dispatched)) :]
    assert [event.attempt for event in later if event.prompt_index == 6] == [10]


def test_the_next_controller_knows_how_many_prompts_were_dropped_before() -> None:
    rollout = {"infrastructure_drop_budget": 1, "deadline_s": 20, "infrastructure_retries": 1}
    config = {"rollout": rollout, "steps": 60}
    before = World(config)
    use_rollouts(before, PoisonedRollouts(before.generators, hangs=(6,)))
    play(before, (70.0, lambda: before.built.control(Stop())))
    assert [event.prompt_index for event in before.events(Dropped)] == [6]
    world = next_incarnation(before, config)
    drawn = world.ledger.totals.drawn if world.ledger else 0
    use_rollouts(world, PoisonedRollouts(world.generators, hangs=(drawn + 2,)))
    error, _ = outcome(world)
    assert "rollout.infrastructure_drop_budget" in str(error)


# --- rollouts that hang in their environment -------------------------------------------------------


def test_prompts_that_hang_cost_no_healthy_engine_its_process() -> None:
    world = World({"rollout": {"deadline_s": 20}, "steps": 40})
    use_rollouts(world, PoisonedRollouts(world.generators, hangs=(6, 7, 8, 9, 10, 11)))
    outcome(world)
    assert [engine.restarts for engine in world.generators.values()] == [0, 0]


@pytest.mark.parametrize(
    ("source", "restarts"), [(Component.ENVIRONMENT, 0), (Component.ENGINE, 1)]
)
def test_a_late_rollout_is_held_against_the_engine_only_if_it_waited_for_it(
    source: Component, restarts: int
) -> None:
    # One in flight: the answer of another group at the same moment would end the row of failures.
    recipe = {"generator": {"request_strikes": 1}, "rollout": {"max_in_flight": 1}}
    world = World(recipe, engines=1)
    late = RolloutFailed(FailureKind.INFRASTRUCTURE, 6, 1, "deadline", "20 s", source)
    world.rollouts.faults = {6: [late]}
    play(world)
    assert world.generators["generator-0"].restarts == restarts


def test_an_environment_that_hangs_for_every_prompt_ends_the_run_and_is_named() -> None:
    world = World({"rollout": {"deadline_s": 60}, "generator": {"restart_budget": 1000}})
    use_rollouts(world, PoisonedRollouts(world.generators, hangs=tuple(range(1000))))
    error, at_s = outcome(world)
    assert isinstance(error, RunFailed)
    assert "rollout" in str(error)
    assert at_s <= 10 * 60 + 60
