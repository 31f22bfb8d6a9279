"""Runs that are cut off and resumed, also under another recipe. Cases of NeMo-RL, AReaL, TRL, OpenRLHF."""

import random
from functools import partial
from typing import Any

import pytest

from offbeat.controller.commands import Abort, Stop
from offbeat.controller.events import Committed, Dispatched, Dropped, Returned, Rewound, StepApplied
from offbeat.fakes.receipts import FakePrompts
from tests.support.scenarios import (
    EVERY_SAMPLER,
    SAMPLERS,
    SurvivingPayloads,
    aborted_generation,
    next_incarnation,
    outcome,
    play,
    reward_failure,
)
from tests.support.world import World

BAD_PROMPTS = (7, 30)
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))]


def forget_weights(world: World) -> None:
    """Let the trainer start anew: its next answer comes from a process without a checkpoint."""
    world.trainer.die()
    world.trainer.dead = False


def cut_off(world: World, at_s: float) -> World:
    """End the whole run; what resumes it has a new trainer."""
    outcome(world, (at_s, lambda: world.built.control(Abort("test"))))
    forget_weights(world)
    return world


def with_bad_prompts(world: World) -> World:
    world.rollouts.faults = {n: [reward_failure(n), reward_failure(n)] for n in BAD_PROMPTS}
    return world


def run_of_four_incarnations(name: str, seed: int, *, keep: float) -> World:
    """Play a run whose controllers are cut off at random records; a part of the payloads survives."""
    rng = random.Random(seed)
    overrides: dict[str, Any] = {
        "steps": 12,
        "sampler": SAMPLERS[name],
        "checkpoint": {"interval": 3},
        "rollout": {"drop_budget": 9, "on_dropped_prompt": rng.choice(["replace", "shrink"])},
    }
    world = with_bad_prompts(World(overrides))
    world.rollouts.slow = {n: rng.choice([0.3, 1.0, 4.0, 9.0]) for n in range(200)}
    play(world, (rng.uniform(4, 25), partial(stop, world)))
    for incarnation in (2, 3, 4):
        records = world.journal.events
        applied = [at for at, event in enumerate(records) if isinstance(event, StepApplied)]
        loses_trainer = rng.random() < 0.4
        known = rng.randint(applied[-1] + 1 if applied else 1, len(records))
        if loses_trainer:
            forget_weights(world)
        dice = random.Random(seed * 31 + incarnation)
        survivors = SurvivingPayloads(lambda _, dice=dice: dice.random() < keep)
        world = with_bad_prompts(
            next_incarnation(world, overrides, known, payloads=survivors, incarnation=incarnation)
        )
        stops = [] if incarnation == 4 else [(rng.uniform(2, 20), partial(stop, world))]
        play(world, *stops)
    return world


def stop(world: World) -> None:
    world.built.control(Stop())


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_no_prompt_is_skipped_or_trained_twice_over_resumes(
    name: str, seed: int, keep: float
) -> None:
    world = run_of_four_incarnations(name, seed, keep=keep)
    world.assert_ledger_agrees()
    assert len(world.trainer.steps) == 12
    ledger = world.built.state.ledger
    known = {*world.trained, *ledger.groups, *BAD_PROMPTS}
    assert not set(range(ledger.totals.drawn)) - known, "skipped"
    worst = max((each["off_policy/staleness_max"] for each in world.telemetry.records), default=0)
    assert worst <= SAMPLERS[name]["max_staleness"]


@pytest.mark.parametrize("kept", [1, 2, 4, 8, 99])
@pytest.mark.parametrize("name", ["in_order", "ready_first", "windowed"])
def test_restored_groups_are_topped_up_never_doubled(name: str, kept: int) -> None:
    overrides = {"sampler": SAMPLERS[name], "steps": 30}
    before = World(overrides)
    before.trainer.step_s = 30.0  # the buffer fills
    outcome(before, (100.0, lambda: before.built.control(Abort("test"))))
    keep = set(sorted(before.built.state.ledger.ready)[:kept])
    world = next_incarnation(before, overrides, payloads=SurvivingPayloads(keep.__contains__))
    play(world)
    world.assert_ledger_agrees()
    assert [len(step) for step in world.trainer.steps] == [4] * 30
    fresh = world.journal.events[len(before.journal.events) :]
    again = {each.prompt_index for each in fresh if isinstance(each, Dispatched)}
    assert not (again & keep) or name == "windowed", "what was kept is not rolled out again"


@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_admission_after_a_resume_is_bounded_as_before(name: str) -> None:
    before = World({"sampler": SAMPLERS[name], "steps": 10})
    play(before)
    overrides = {"sampler": SAMPLERS[name], "steps": 30}
    world = next_incarnation(before, overrides, payloads=SurvivingPayloads())
    world.trainer.step_s = 60.0
    world.rollouts.rollout_s = 0.1
    play(world)
    world.assert_ledger_agrees()
    assert world.rollouts.peak <= world.built.state.sampler.max_outstanding_groups
    assert world.worst_staleness() <= SAMPLERS[name]["max_staleness"]


@pytest.mark.parametrize("budget", [0, 2])
def test_the_group_that_exceeds_the_drop_budget_is_trained_by_a_resume_with_mended_code(
    budget: int,
) -> None:
    before = World({"rollout": {"drop_budget": budget, "data_retries": 0}})
    before.rollouts.faults = {n: [reward_failure(n)] for n in range(40)}
    before.fail()
    dropped = {each.prompt_index for each in before.events(Dropped)}
    assert len(dropped) == budget
    world = next_incarnation(before, {"rollout": {"drop_budget": budget}})
    play(world)
    world.assert_ledger_agrees()
    drawn = set(range(world.built.state.ledger.totals.drawn))
    assert drawn - dropped - set(world.built.state.ledger.groups) == set(world.trained)


# --- another recipe --------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [0, 3], ids=["", "group 0 fails"])
@pytest.mark.parametrize("capacity", [4, 5])
@pytest.mark.parametrize("keep", ["late", "early", "all", "none"])
@pytest.mark.parametrize("at_s", [20.0, 100.0], ids=["before a step", "after steps"])
def test_a_resume_into_a_smaller_buffer_goes_on(
    at_s: float, keep: str, capacity: int, failures: int
) -> None:
    config = {"sampler": {"name": "in_order", "max_staleness": 4}, "steps": 12}
    before = World(config)
    before.trainer.step_s = 30.0
    slow = (1, 2, 3) if at_s < 50 else (14, 15)
    before.rollouts.slow = {n: 500.0 if n in slow else 1.0 for n in range(200)}
    cut_off(before, at_s)
    ready = sorted(before.built.state.ledger.ready)
    half = len(ready) // 2
    kept = {"late": ready[half:], "early": ready[:half], "all": ready, "none": []}[keep]
    world = next_incarnation(
        before,
        {**config, "buffer": {"capacity_groups": capacity}},
        payloads=SurvivingPayloads(set(kept).__contains__),
    )
    world.trainer.step_s, world.rollouts.slow = 2.0, {}
    world.rollouts.faults = {0: [aborted_generation(0)] * failures}
    play(world)
    world.assert_ledger_agrees()
    assert [len(step) for step in world.trainer.steps] == [4] * 12


@pytest.mark.parametrize("at_s", [20.0, 90.0])
@pytest.mark.parametrize("name", EVERY_SAMPLER)
def test_a_resume_with_a_tighter_bound_goes_on(name: str, at_s: float) -> None:
    before = World({"sampler": {**SAMPLERS[name], "max_staleness": 4}, "steps": 30})
    before.trainer.step_s = 20.0
    cut_off(before, at_s)
    overrides = {"sampler": {**SAMPLERS[name], "max_staleness": 0}, "steps": 30}
    world = next_incarnation(before, overrides, payloads=SurvivingPayloads())
    play(world)
    world.assert_ledger_agrees()
    assert world.worst_staleness() == 0


# --- the end of a run ------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "interval"), [(10, 4), (6, 100)])
def test_a_finished_run_that_is_asked_for_more_steps_trains_none_again(
    steps: int, interval: int
) -> None:
    before = World({"steps": steps, "checkpoint": {"interval": interval}})
    play(before)
    forget_weights(before)
    overrides = {"steps": 2 * steps, "checkpoint": {"interval": interval}}
    world = next_incarnation(before, overrides)
    play(world)
    world.assert_ledger_agrees()
    assert not world.events(Rewound), "nothing was lost, so nothing was undone"
    assert max(world.trainer.checkpoints) == 2 * steps


def test_prompts_that_end_leave_a_checkpoint_of_the_last_version() -> None:
    world = World({"checkpoint": {"interval": 4}}, prompts=FakePrompts(22))
    play(world)
    assert len(world.trainer.steps) == 6
    assert max(world.trainer.checkpoints) == 6


def test_a_run_that_wants_no_checkpoints_keeps_none_of_its_last_step() -> None:
    world = World({"checkpoint": {"interval": 0}})
    play(world)
    assert not world.trainer.checkpoints


def test_a_dropped_prompt_is_not_drawn_again_by_the_next_incarnation() -> None:
    sampler = {
        "name": "windowed",
        "max_staleness": 0,
        "over_sampling_ratio": 2.0,
        "on_evicted": "drop",
    }
    before = World({"sampler": sampler, "steps": 6})
    play(before)
    dropped = {each.prompt_index for each in before.events(Dropped)}
    assert dropped
    world = next_incarnation(before, {"sampler": sampler, "steps": 12})
    play(world)
    assert not dropped & set(world.trained)
    assert not dropped & {prompt_index for prompt_index, _ in world.rollouts.started}


# --- other sampling settings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "generator",
    [
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"top_p": 0.9}},
        {"sampling": {"top_k": 20}},
        {"sampling": {"min_p": 0.05}},
        {"sampling": {"stop": ["</answer>"]}},
        {"sampling": {"max_new_tokens": 7}},
        {"sampling": {"stop_token_ids": [5]}},
        {"max_model_len": 100},
    ],
    ids=str,
)
def test_groups_sampled_under_other_settings_are_rolled_out_again(
    generator: dict[str, Any],
) -> None:
    before = World({"supervision": {"signal_grace_s": 10}})
    before.trainer.step_s = 30.0  # the buffer fills
    outcome(before, (50.0, lambda: before.built.control(Abort("test"))))
    ledger = before.built.state.ledger
    ready = {*ledger.ready, *ledger.training}
    assert ledger.ready and ledger.training, "those of the open step are ready once it is undone"
    world = next_incarnation(before, {"generator": generator}, payloads=SurvivingPayloads())
    play(world)
    world.assert_ledger_agrees()
    again = {
        each.prompt_index for each in world.events(Returned) if each.reason == "other_sampling"
    }
    assert again == ready
    asked = {each.receipt.sampling for each in world.events(Committed)}
    assert len(asked) == 2, "what was trained last was sampled under the new settings"


def test_groups_sampled_under_the_same_settings_are_trained_as_they_are() -> None:
    before = World()
    before.trainer.step_s = 30.0
    outcome(before, (50.0, lambda: before.built.control(Abort("test"))))
    ready = set(before.built.state.ledger.ready)
    world = next_incarnation(before, {}, payloads=SurvivingPayloads())
    play(world)
    fresh = world.journal.events[len(before.journal.events) :]
    assert ready.isdisjoint(each.prompt_index for each in fresh if isinstance(each, Dispatched))
