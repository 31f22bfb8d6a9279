"""The very controller against a plain loop: ``in_order`` without look-ahead trains what that trains."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from oracle import Step, data_failures, reference, steps_of
from planted.planting import become

from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.controller.controller import Controller
from offbeat.controller.engine_record import EngineRecord
from offbeat.controller.events import Dropped, DropReason
from offbeat.controller.rollouts import RolloutPump
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.draws import EpisodePlan, draw_plan
from offbeat.plugins.simulation.episode import EpisodeResult, play
from offbeat.plugins.simulation.faults import KINDS, POISON
from offbeat.plugins.simulation.schedule import PlannedFault

LONG = pytest.mark.long
BASE = RunConfig(model=ModelConfig(path="none"), steps=12)
SYNCHRONOUS = {
    "sampler": {"name": "in_order", "max_staleness": 0, "max_lookahead": 0},
    "sync": {"interval": 1},
    "trainer": {"step_retries": 6},
}
SOME = [range(8), pytest.param(range(8, 40), marks=LONG)]
BOTH_FILTERS = {"zero_variance": True, "max_truncated_fraction": 0.4}
REWINDS = ("trainer", "controller", "network", "all")
BY_DATA = tuple(
    name for name, kind in KINDS.items() if kind.profile == "data" and kind.target == "worker"
)


def plan_of(seed: int, profile: str, **settings: Any) -> EpisodePlan:
    """A drawn run, synchronous; whatever strikes it, every step is applied in the end."""
    plan = draw_plan(seed, BASE, profile, None)
    whole = plan.config.model_dump()
    for name, section in {**SYNCHRONOUS, **settings}.items():
        whole[name] = section if name == "sampler" else {**whole[name], **section}
    whole["rollout"]["infrastructure_retries"] = 40  # nothing is given up for want of an engine
    whole["rollout"] |= {"reward_call_budget": None, "on_reward_budget_spent": "fail"}
    # A sample that is masked changes what is trained, as it should; here nothing may change it.
    whole["rollout"] |= {"on_failed_sample": "fail_group", "min_valid_samples": None}
    dropping = ("gradient_nan", *POISON)
    planned_faults = [strike for strike in plan.planned_faults if strike.action not in dropping]
    config = RunConfig.model_validate(whole)
    return msgspec.structs.replace(
        plan, config=config, planned_faults=planned_faults, sample_failures=0.0
    )


def played(seed: int, plan: EpisodePlan) -> EpisodeResult:
    result = play(seed, plan)
    assert (result.outcome, violations_of(result)) == ("finished", []), f"seed {seed}"
    return result


def without_versions(steps: list[Step]) -> list[Step]:
    return [replace(step, spans=()) for step in steps]


# --- nothing is dropped for a fault -----------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=LONG)], ids=str)
def test_without_faults_every_step_is_the_references_to_the_last_bit(seeds: range) -> None:
    for seed in seeds:
        plan = plan_of(seed, "none")
        expected = reference(plan.config, prompts=plan.prompts)
        assert steps_of(played(seed, plan)) == expected, f"seed {seed}"


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 60), marks=LONG)], ids=str)
@pytest.mark.parametrize("profile", ["engines", "network", "data", "controller", "trainer", "all"])
def test_what_is_killed_late_or_lost_changes_nothing_of_what_is_trained(
    profile: str, seeds: range
) -> None:
    fired = 0
    for seed in seeds:
        plan = plan_of(seed, profile, rollout={"data_retries": 8})
        result = played(seed, plan)
        fired += len(result.fired)
        expected = reference(plan.config, prompts=plan.prompts)
        assert steps_of(result) == expected, f"seed {seed}"
    assert fired > 2 * len(seeds)


@pytest.mark.parametrize("seeds", SOME, ids=str)
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_a_look_ahead_changes_which_weights_sample_and_nothing_else(
    staleness: int, seeds: range
) -> None:
    for seed in seeds:
        plan = plan_of(
            seed,
            REWINDS[seed % len(REWINDS)],
            sampler={"name": "in_order", "max_staleness": staleness},
            filters={"zero_variance": False, "max_truncated_fraction": None},
            rollout={"data_retries": 8},
        )
        expected = reference(plan.config, prompts=plan.prompts)
        found = steps_of(played(seed, plan))
        assert without_versions(found) == without_versions(expected), f"seed {seed}"


# --- drops and filters -----------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", SOME, ids=str)
@pytest.mark.parametrize("profile", ["none", *REWINDS])
def test_filtered_groups_are_replaced_by_the_next_prompts_in_order(
    profile: str, seeds: range
) -> None:
    filtered = 0
    for seed in seeds:
        plan = plan_of(seed, profile, filters=BOTH_FILTERS, rollout={"data_retries": 8})
        result = played(seed, plan)
        filtered += sum(isinstance(event, Dropped) for event in result.journal)
        expected = reference(plan.config, prompts=plan.prompts)
        assert steps_of(result) == expected, f"seed {seed}"
    assert filtered > 6 * len(seeds)


def bad_data(rng: random.Random) -> list[PlannedFault]:
    """Single failures, and bursts: a prompt that fails is asked again at once, and fails again."""
    single = [PlannedFault(rng.choice(BY_DATA), at_step=rng.randint(0, 9)) for _ in range(10)]
    bursts = [
        PlannedFault("reward_raises", at_step=first + rng.randint(0, 2)) for first in (0, 4, 7)
    ]
    return [*single, *bursts * 10]


@pytest.mark.parametrize("seeds", SOME, ids=str)
@pytest.mark.parametrize("data_retries", [0, 1])
@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_prompts_given_up_are_replaced_or_shrink_their_step(
    policy: str, data_retries: int, seeds: range
) -> None:
    dropped = Counter[str]()
    for seed in seeds:
        plan = plan_of(
            seed,
            ("data", "engines")[seed % 2],
            rollout={
                "data_retries": data_retries,
                "on_dropped_prompt": policy,
                "drop_budget": 100,
                "outage_failures": 1000,  # the reference counts each failure
            },
            filters={**BOTH_FILTERS, "zero_variance": seed % 3 == 0},
        )
        rng = random.Random(f"{seed}/bad data")
        planned_faults = [
            *plan.planned_faults,
            *bad_data(rng),
            PlannedFault("controller_killed", at_step=5),
        ]
        result = played(seed, msgspec.structs.replace(plan, planned_faults=planned_faults))
        dropped.update(
            "shrunk" if event.shrinks else "replaced"
            for event in result.journal
            if isinstance(event, Dropped) and event.reason is not DropReason.FILTERED
        )
        expected = reference(plan.config, prompts=plan.prompts, failures=data_failures(result))
        assert steps_of(result) == expected, f"seed {seed}"
    assert dropped["replaced"]  # also of a step that has shrunk as far as it may
    assert bool(dropped["shrunk"]) == (policy == "shrink")


@pytest.mark.parametrize("steps", [(1,), (6, 6), (3, 9, 12)])
def test_a_step_that_is_not_applied_is_tried_again_with_the_next_prompts(
    steps: tuple[int, ...],
) -> None:
    for seed in range(8):
        plan = plan_of(seed, "none", filters=BOTH_FILTERS)
        planned_faults = [PlannedFault("gradient_nan", at_step=step - 1) for step in steps]
        result = played(seed, msgspec.structs.replace(plan, planned_faults=planned_faults))
        expected = reference(plan.config, prompts=plan.prompts, refusals=Counter(steps))
        assert steps_of(result) == expected, f"seed {seed}"


def test_the_steps_after_one_that_is_not_applied_train_the_batches_that_were_bound_to_later_ones() -> (
    None
):
    for seed in range(8):
        plan = plan_of(
            seed,
            "none",
            sampler={"name": "in_order", "max_staleness": 1 + seed % 3},
            filters={"zero_variance": False, "max_truncated_fraction": None},
        )
        planned_faults = [PlannedFault("gradient_nan", at_step=step) for step in (2, 6)]
        result = played(seed, msgspec.structs.replace(plan, planned_faults=planned_faults))
        expected = reference(plan.config, prompts=plan.prompts, refusals={3: 1, 7: 1})
        found = steps_of(result)
        assert without_versions(found) == without_versions(expected), f"seed {seed}"


# --- the reference is not a mirror ------------------------------------------------------------------


class _Reseeding(RolloutPump):
    def _task(self, prompt: Prompt, attempt: int, engine: EngineRecord) -> RolloutTask:
        task = super()._task(prompt, attempt, engine)
        return msgspec.structs.replace(task, seed=task.seed + attempt - 1)


class SamplesAnewForEachAttempt(Controller):
    """A retried group is another one: legal for the auditor, and no run is reproducible."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        become(self._rollout_pump, _Reseeding)


def test_a_controller_that_samples_anew_for_each_attempt_differs_once_a_rollout_fails() -> None:
    quiet = plan_of(3, "none", rollout={"data_retries": 1})
    struck = msgspec.structs.replace(
        quiet, planned_faults=[PlannedFault("reward_raises", at_step=4)]
    )
    expected = reference(quiet.config, prompts=quiet.prompts)
    assert steps_of(play(3, quiet, SamplesAnewForEachAttempt)) == expected
    assert steps_of(play(3, struck, SamplesAnewForEachAttempt)) != expected
    assert steps_of(play(3, struck)) == expected
