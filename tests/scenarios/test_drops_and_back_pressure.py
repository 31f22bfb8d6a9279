"""Dropped prompts, permits, and ends of the prompts. Cases of NeMo-RL, prime-rl, SkyRL, tinker, AReaL."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from offbeat.controller.commands import Abort, Stop
from offbeat.controller.errors import RunFailed, RunStalled
from offbeat.controller.events import Dispatched, Dropped, Returned
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from tests.support.fakes import FakeGenerator, FakeRollouts
from tests.support.scenarios import (
    EVERY_SAMPLER,
    SAMPLERS,
    SurvivingPayloads,
    aborted_generation,
    next_incarnation,
    outcome,
    play,
    reward_failure,
    use_rollouts,
)
from tests.support.world import World

FLAT = {"rewards": (1.0, 1.0)}


def bad(*prompt_indices: int) -> dict[int, list[Exception]]:
    """Failures that use up the attempts of these prompts."""
    return {
        prompt_index: [reward_failure(prompt_index) for _ in range(2)]
        for prompt_index in prompt_indices
    }


# --- drops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["replace", "shrink"])
@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_a_drop_budget_stops_no_policy(name: str, on: str) -> None:
    limits = {"drop_budget": 5, "on_dropped_prompt": on}
    world = World({"sampler": SAMPLERS[name], "rollout": limits})
    world.rollouts.faults = bad(2, 9, 21)
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trainer.steps) == 10
    assert 40 - len(world.trained) == (0 if on == "replace" else 3)


@pytest.mark.parametrize("on", ["replace", "shrink"])
@pytest.mark.parametrize("count", [16, 17, 18, 19])
@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_drops_at_the_end_of_the_prompts_end_in_a_short_step(
    name: str, count: int, on: str
) -> None:
    limits = {"drop_budget": 9, "on_dropped_prompt": on}
    world = World({"sampler": SAMPLERS[name], "rollout": limits}, prompts=FakePrompts(count))
    lost = (count - 1, count - 3, 1)
    world.rollouts.faults = bad(*lost)
    play(world)
    world.assert_ledger_agrees()
    assert sorted(world.trained) == [each for each in range(count) if each not in lost]


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_a_last_partial_step_that_loses_all_its_prompts_ends_the_run_in_order(name: str) -> None:
    overrides = {"sampler": SAMPLERS[name], "rollout": {"drop_budget": 9}}
    world = World(overrides, prompts=FakePrompts(10))
    world.rollouts.faults = bad(8, 9)
    play(world)
    world.assert_ledger_agrees()
    assert sorted(world.trained) == list(range(8))


def test_a_replacement_that_fails_too_is_bounded() -> None:
    world = World({"sampler": SAMPLERS["in_order"], "rollout": {"drop_budget": 6}})
    world.rollouts.faults = bad(*range(12, 30))
    error, at_s = outcome(world)
    assert isinstance(error, RunFailed) and "rollout.drop_budget" in str(error)
    assert at_s < 60


def test_shortfalls_of_closed_steps_are_forgotten() -> None:
    world = World(
        {
            "steps": 60,
            "sampler": SAMPLERS["in_order"],
            "rollout": {"drop_budget": 99, "on_dropped_prompt": "shrink"},
            "filters": {"zero_variance": True},
        }
    )
    world.rollouts.faults = bad(*range(3, 200, 7))
    world.rollouts.forged = dict.fromkeys(range(5, 200, 9), FLAT)
    play(world)
    world.assert_ledger_agrees()
    assert len(world.built.state.ledger.batch_deficits) <= 3


@pytest.mark.parametrize("late_s", [3.0, 5.0, 9.0, 20.0])
def test_a_drop_in_the_middle_of_a_wait_closes_the_open_step(late_s: float) -> None:
    limits = {"drop_budget": 3, "on_dropped_prompt": "shrink"}
    world = World({"sampler": SAMPLERS["sync"], "steps": 3, "rollout": limits})
    world.rollouts.slow, world.rollouts.faults = {2: late_s}, bad(2)
    play(world)
    assert [len(step) for step in world.trainer.steps] == [3, 4, 4]


# --- permits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_a_group_in_its_back_off_holds_no_permit(name: str) -> None:
    limits = {"max_in_flight": 2, "backoff_s": 8, "backoff_max_s": 10}
    world = World({"sampler": SAMPLERS[name], "rollout": limits})
    world.rollouts.faults = {1: [aborted_generation(1)] * 3}
    play(world)
    world.assert_ledger_agrees()
    events = world.journal.events
    failed = next(at for at, event in enumerate(events) if isinstance(event, Returned))
    after = next(event for event in events[failed:] if isinstance(event, Dispatched))
    assert len(world.trained) == 40 and after.prompt_index != 1


@dataclass
class TimedRollouts(FakeRollouts):
    """Records when every rollout was asked for."""

    engines: dict[str, FakeGenerator] = field(default_factory=dict[str, FakeGenerator])
    asked_at: Counter[float] = field(default_factory=Counter[float])

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        self.asked_at[round(asyncio.get_running_loop().time(), 6)] += 1
        return await super().rollout(fence, task)


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_after_a_barrier_concurrency_is_refilled_at_once(name: str) -> None:
    world = World({"sampler": SAMPLERS[name]}, engines=4)
    rollouts = use_rollouts(world, TimedRollouts(world.generators))
    play(world)
    assert rollouts.peak >= min(world.built.state.sampler.max_outstanding_groups, 4)
    assert max(rollouts.asked_at.values()) >= 4


# --- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_the_prompts_may_end_anywhere(name: str, count: int) -> None:
    world = World({"sampler": SAMPLERS[name]}, prompts=FakePrompts(count))
    world.rollouts.slow = {count - 1: 30.0, 0: 11.0}
    play(world)
    world.assert_ledger_agrees()
    assert sorted(world.trained) == list(range(count))


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_infrastructure_failures_at_the_end_of_the_prompts_lose_none(name: str) -> None:
    world = World({"sampler": SAMPLERS[name]}, prompts=FakePrompts(14))
    world.rollouts.faults = {each: [aborted_generation(each)] * 4 for each in (12, 13)}
    play(world)
    world.assert_ledger_agrees()
    assert sorted(world.trained) == list(range(14))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))]
)
@pytest.mark.parametrize("count", [13, 16, 22, 23])
@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_the_end_of_the_prompts_is_found_again_after_resumes(
    name: str, count: int, seed: int
) -> None:
    dice = random.Random(seed)
    overrides = {
        "sampler": SAMPLERS[name],
        "steps": 20,
        "checkpoint": {"interval": 2},
        "rollout": {
            "drop_budget": 9,
            "on_dropped_prompt": dice.choice(["replace", "shrink"]),
        },
    }
    lost = dice.sample(range(count), 2)
    world = World(overrides, prompts=FakePrompts(count))
    world.rollouts.slow = {each: dice.choice([0.3, 1.0, 7.0]) for each in range(100)}
    world.rollouts.faults = bad(*lost)
    end = dice.choice([Stop(), Abort("test")])
    outcome(world, (dice.uniform(3, 20), lambda: world.built.control(end)))
    gone = {each.prompt_index for each in world.events(Dropped)}
    for incarnation in (2, 3):
        if dice.random() < 0.4:
            world.trainer.die()
            world.trainer.dead = False
        survivors = SurvivingPayloads(lambda _: dice.random() < 0.6)
        world = next_incarnation(world, overrides, payloads=survivors, incarnation=incarnation)
        world.rollouts.faults = bad(*(each for each in lost if each not in gone))
        stops = [(dice.uniform(1, 10), partial(stop, world))] if incarnation == 2 else []
        play(world, *stops)
        gone |= {each.prompt_index for each in world.events(Dropped)}
    assert sorted(world.trained) == [each for each in range(count) if each not in gone]
    assert gone <= set(lost)


def stop(world: World) -> None:
    world.built.control(Stop())


@dataclass
class BrokenPrompts(FakePrompts):
    """Prompts whose file cannot be read from some row on."""

    def prompt(self, prompt_index: int) -> Prompt | None:
        if prompt_index == 17:
            raise OSError("disk gone")
        return super().prompt(prompt_index)


def test_a_prompt_source_that_raises_ends_the_run_with_its_error() -> None:
    world = World(prompts=BrokenPrompts())
    error, at_s = outcome(world)
    assert isinstance(error, RunFailed) and "disk gone" in str(error)
    assert at_s < 60 and world.rollouts.running == 0


def test_a_bug_in_one_rollout_cancels_the_others() -> None:
    world = World()
    world.rollouts.faults = {3: [RolloutFailed(FailureKind.BUG, 3, 1, "KeyError", "x")]}
    world.rollouts.slow = {4: 500.0}
    error, at_s = outcome(world)
    assert isinstance(error, RunFailed) and at_s < 10
    assert world.rollouts.running == 0 and world.rollouts.closed


@pytest.mark.parametrize("policy", ["NeverAdmits", "NeverSelects"])
def test_a_policy_that_lets_nothing_through_is_a_stall(policy: str) -> None:
    target = f"tests.support.broken_policies:{policy}"
    error, at_s = outcome(World({"sampler": {"name": "custom", "target": target}}))
    assert isinstance(error, RunFailed) and isinstance(error.causes[0], RunStalled)
    assert at_s < 100, "no call is in progress, so supervision.stall_timeout_s is not waited for"


# --- filters and sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_a_filtered_group_gives_its_capacity_back(name: str) -> None:
    world = World({"sampler": SAMPLERS[name], "filters": {"zero_variance": True}})
    world.rollouts.forged = dict.fromkeys(range(0, 400, 2), FLAT)
    play(world)
    world.assert_ledger_agrees()
    assert [len(step) for step in world.trainer.steps] == [4] * 10
    assert world.worst_staleness() <= SAMPLERS[name]["max_staleness"]


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_a_run_whose_groups_are_all_filtered_still_ends(name: str) -> None:
    filters = {"zero_variance": True, "max_per_step": 20}
    world = World({"sampler": SAMPLERS[name], "steps": 3, "filters": filters})
    world.rollouts.forged = dict.fromkeys(range(4000), FLAT)
    play(world)
    assert len(world.trainer.steps) == 3


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("name", ["in_order", "weight_fifo", "ready_first", "windowed"])
def test_the_smallest_runs_end(name: str, staleness: int, groups: int) -> None:
    world = World(
        {
            "sampler": {"name": name, "max_staleness": staleness},
            "groups_per_step": groups,
            "rollout": {"max_in_flight": 1},
            "buffer": {"capacity_groups": groups},
        },
        engines=1,
    )
    world.rollouts.faults = {1: [aborted_generation(1)]}
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trained) == 10 * groups


@pytest.mark.parametrize("mode", ["keep", "drain", "abort_stale"])
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_time_in_the_buffer_counts_as_staleness(name: str, interval: int, mode: str) -> None:
    bound = max(interval - 1, SAMPLERS[name]["max_staleness"])
    sampler = {**SAMPLERS[name], "max_staleness": bound}
    world = World({"sampler": sampler, "sync": {"interval": interval, "mode": mode}}, engines=4)
    world.rollouts.slow = {each: 0.1 if each % 5 else 17.0 for each in range(400)}
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    assert world.worst_staleness() <= bound
