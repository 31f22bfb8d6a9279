"""Calls of reward functions are bounded for the whole run: over workers, failures and resumes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from offbeat.config.crosschecks import reward_budget_clashes
from offbeat.config.limits import max_evaluation_calls, max_reward_calls
from offbeat.config.run import RunConfig
from offbeat.controller.errors import RewardCallBudgetSpent
from offbeat.controller.events import Opened, RewardCallsMade
from offbeat.controller.reward_budget import RewardBudget
from offbeat.controller.run_stats import RunStats
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from tests.support.fakes import FakeGenerator, FakeRollouts
from tests.support.world import World, bad_data

JUDGE = {"name": "function", "target": "judge:reward"}


@dataclass
class JudgedRollouts(FakeRollouts):
    """A worker that reports with each reply, failures too, how many calls it has made so far."""

    world: World | None = None
    calls_per_group: int = 2
    made: int = 0

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        assert self.world is not None
        self.made += self.calls_per_group
        try:
            return await super().rollout(fence, task)
        finally:
            self.world.built.state.reward_calls("environment-0-first", self.made)


def judged(rollout: Mapping[str, Any], **settings: Any) -> tuple[World, JudgedRollouts]:
    world = World({"environment": JUDGE, "rollout": dict(rollout), **settings})
    engines: dict[str, FakeGenerator] = world.generators
    world.rollouts = rollouts = JudgedRollouts(engines, world=world)
    return world, rollouts


def test_a_run_within_its_budget_trains_all_its_steps_and_counts_its_calls() -> None:
    world, rollouts = judged({"reward_call_budget": 100})
    world.run()
    world.assert_ledger_agrees()
    assert rollouts.made == world.built.state.costs.reward_calls == 80  # 10 x 4 groups of 2


def test_the_run_ends_by_name_before_a_group_that_may_go_beyond_its_budget() -> None:
    world, rollouts = judged({"reward_call_budget": 51}, checkpoint={"interval": 50})
    failure = world.fail()
    assert isinstance(failure.causes[0], RewardCallBudgetSpent)
    assert "has made 50 calls of reward functions, and rollout.reward_call_budget=51" in str(
        failure
    )
    assert rollouts.made == 50
    assert world.trainer.checkpoints, "what was trained is kept"


def test_with_stop_it_ends_as_an_operators_stop_does() -> None:
    world, rollouts = judged({"reward_call_budget": 51, "on_reward_budget_spent": "stop"})
    world.run()
    world.assert_ledger_agrees()
    assert rollouts.made == 50
    assert 1 < world.built.state.ledger.trainer_version < 10


def test_calls_of_failed_rollouts_count() -> None:
    world, rollouts = judged({"reward_call_budget": 51, "data_retries": 3})
    world.rollouts.faults = {0: [bad_data(0)] * 3}
    assert isinstance(world.fail().causes[0], RewardCallBudgetSpent)
    assert rollouts.made == world.built.state.costs.reward_calls == 50


def test_a_run_that_needs_no_further_group_does_not_ask_for_calls() -> None:
    world, rollouts = judged({"reward_call_budget": 80})
    world.run()
    assert rollouts.made == 80
    assert world.built.state.ledger.trainer_version == 10


def test_a_group_is_dispatched_only_if_those_in_flight_may_make_all_their_calls() -> None:
    """Of 8 calls per group, 4 of its tries, it makes 2."""
    environment = {**JUDGE, "reward_retries": 3}
    world, rollouts = judged({"reward_call_budget": 51}, environment=environment)
    failure = world.fail()
    assert isinstance(failure.causes[0], RewardCallBudgetSpent)
    assert rollouts.made == 44  # 52 would be beyond it
    assert rollouts.peak <= 6


def test_a_resumed_run_goes_on_from_the_calls_of_the_ones_before() -> None:
    before = Opened("run", 1, "a"), RewardCallsMade("environment-0-old", 40)
    world, rollouts = judged({"reward_call_budget": 60})
    world.journal.stats, world.incarnation = RunStats.fold(before), 2
    assert isinstance(world.fail().causes[0], RewardCallBudgetSpent)
    assert rollouts.made == 20
    assert world.built.state.costs.reward_calls == 60


async def test_a_late_report_is_counted_once_and_an_older_one_not_at_all() -> None:
    world, _ = judged({"reward_call_budget": 60})
    state = world.controller().state
    for process, calls in (("a", 3), ("b", 5), ("a", 7), ("a", 3), ("b", 5)):
        state.reward_calls(process, calls)
    assert state.costs.reward_calls == 12
    assert [event.calls for event in world.events(RewardCallsMade)] == [3, 5, 7]


@pytest.mark.parametrize(
    ("environment", "rollout", "calls"),
    [
        (JUDGE, {}, 2),
        ({**JUDGE, "reward_retries": 3}, {}, 8),
        (JUDGE, {"on_failed_sample": "mask"}, 4),  # the group, then each sample by itself
        (JUDGE, {"on_failed_sample": "retry", "sample_retries": 2}, 8),
        ({"name": "function", "target": "math_verify"}, {}, 0),  # a grader of the package is free
        ({"name": "arithmetic"}, {}, 0),
        (
            {
                "name": "function",
                "rewards": {
                    "a": {"target": "m:a"},
                    "b": {"target": "m:b"},
                    "c": {"target": "math_verify"},
                },
            },
            {},
            4,
        ),
    ],
)
def test_the_most_calls_of_a_group_follow_from_the_recipe(
    environment: dict[str, Any], rollout: dict[str, Any], calls: int
) -> None:
    values = {"steps": 1, "samples_per_group": 2, "model": {"path": "x"}}
    config = RunConfig.model_validate({**values, "environment": environment, "rollout": rollout})
    assert max_reward_calls(config) == calls


@pytest.mark.parametrize(
    ("open_", "interval", "covers"),
    [
        ({}, 5, True),  # 2 of one more group, 4 of the evaluation due at 5
        ({"is_busy": True}, 5, False),  # 4 more
        ({"requested_version": 0}, 5, False),
        ({"newest_due": -1}, 5, False),  # due, and about to be requested
        ({"is_busy": True}, 20, True),  # the run has 10 steps: none comes after it
    ],
)
async def test_a_group_leaves_the_calls_of_the_next_evaluation(
    open_: dict[str, Any], interval: int, *, covers: bool
) -> None:
    evaluated = {"interval": interval, "prompts": 4, "path": "held-out.jsonl"}
    world, _ = judged({"reward_call_budget": 40}, eval=evaluated)
    state = world.controller().state
    state.reward_calls("a", 34)
    for name, value in open_.items():
        setattr(state.evaluation, name, value)
    budget = RewardBudget(state)
    assert budget.covers_next_group is covers
    assert budget.metrics() == {"rollout/reward_calls": 34, "rollout/reward_calls_left": 6}


def test_a_budget_covers_the_first_step_and_an_evaluation() -> None:
    values: dict[str, Any] = {"steps": 1, "samples_per_group": 2, "model": {"path": "x"}}
    values |= {"groups_per_step": 3, "environment": JUDGE, "data": {"path": "rows.jsonl"}}
    values["eval"] = {"interval": 1, "prompts": 4, "samples": 2, "path": "held-out.jsonl"}
    config = RunConfig.model_validate({**values, "rollout": {"reward_call_budget": 13}})
    assert max_evaluation_calls(config) == 8
    (clash,) = reward_budget_clashes(config)
    assert "an evaluation up to 8" in clash.message and "Set it to 14 or more" in clash.hint
