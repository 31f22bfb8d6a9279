"""A run that is cut off at any of its journal's records goes on from there as if nothing had been.

Every record of a run of twenty steps is a crash point, and every eleventh of them in the short suite. The
controller dies there alone, or with the whole cluster (in the short suite by turns); of what its journal
had not synced yet a random part is lost.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import pytest
from oracle import Step, reference, steps_of

from offbeat.config.run import RunConfig
from offbeat.controller.events import (
    Admitted,
    Opened,
)
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.draws import EpisodePlan
from offbeat.plugins.simulation.episode import EpisodeResult, play
from offbeat.plugins.simulation.schedule import PlannedFault

SEED: Final = 7
STEPS: Final = 20
GROUPS_PER_STEP: Final = 2
CRASHES: Final = ("controller_killed", "cluster_lost")
SYNCHRONOUS: Final = {"name": "in_order", "max_staleness": 0, "max_lookahead": 0}
LOOKING_AHEAD: Final = {"name": "in_order", "max_staleness": 2}
EVERY: Final = (22, pytest.param(1, marks=pytest.mark.long))
EVERY_THIRD: Final = (62, pytest.param(3, marks=pytest.mark.long))
UNORDERED: Final = (
    {"name": "ready_first", "max_staleness": 1},
    {"name": "weight_fifo", "max_staleness": 1},
    {"name": "windowed", "max_staleness": 1, "over_sampling_ratio": 1.5, "freshest_first": True},
)


def plan_with(sampler: dict[str, Any], prompts: int | None = None) -> EpisodePlan:
    """No prompt may be dropped; a checkpoint every fourth step; most payloads are spooled."""
    config = RunConfig.model_validate(
        {
            "steps": STEPS,
            "groups_per_step": GROUPS_PER_STEP,
            "samples_per_group": 2,
            "seed": 11,
            "model": {"path": "none"},
            "sampler": sampler,
            "sync": {"deadline_s": 8.0},
            "generator": {"engines": 2, "start_deadline_s": 30.0},
            "trainer": {
                "min_tokens_per_chunk": 1,
                "step_deadline_s": 10.0,
                "start_deadline_s": 40.0,
            },
            "rollout": {"deadline_s": 15.0, "drop_budget": 0},
            "checkpoint": {"interval": 4, "keep": 2, "deadline_s": 10.0},
            "supervision": {"stall_timeout_s": 120.0},
        }
    )
    return EpisodePlan(config, [], prompts, spools=True, workers=2)


def crashed(plan: EpisodePlan, *planned_faults: PlannedFault) -> EpisodeResult:
    return play(SEED, msgspec.structs.replace(plan, planned_faults=list(planned_faults)))


def lost_records(result: EpisodeResult, record: int) -> int:
    """Of the unsynced tail, with the controller that died at this record."""
    incarnations = [
        place for place, event in enumerate(result.journal) if isinstance(event, Opened)
    ]
    return record - incarnations[1]


def problem_of(result: EpisodeResult) -> str:
    """What is wrong with a run by itself: it did not finish, or the auditor has something to say."""
    if result.outcome != "finished":
        return f"{result.outcome}: {result.error}"
    return "; ".join(violations_of(result))


# --- in order ----------------------------------------------------------------------------------------


def prompt_indices_of(steps: list[Step]) -> list[tuple[int, ...]]:
    return [step.prompt_indices for step in steps]


def differences(
    plan: EpisodePlan, crash_points: Iterable[Sequence[PlannedFault]]
) -> dict[int, str]:
    """What is wrong, or other than without a crash, by the record of the first one."""
    whole = crashed(plan)
    expected = reference(plan.config)
    assert (prompt_indices_of(steps_of(whole)), whole.weights) == (
        prompt_indices_of(expected),
        expected[-1].digest,
    )
    found = dict[int, str]()
    for planned_faults in crash_points:
        result = crashed(plan, *planned_faults)
        problem = problem_of(result)
        # A run that was cut short of its last records may have fewer of them than the whole one
        reached = [each for each in planned_faults if (each.at_record or 0) <= len(result.journal)]
        if result.fired != [strike.action for strike in reached]:
            problem += f" what fired is {result.fired}"
        if prompt_indices_of(steps_of(result)) != prompt_indices_of(expected):
            problem += " other steps"
        if result.weights != whole.weights:
            problem += " other weights"
        if problem:
            found[planned_faults[0].at_record or 0] = problem
    return found


def records_of(plan: EpisodePlan, every: int = 1, crash: str = CRASHES[0]) -> range:
    first = 1 + CRASHES.index(crash) * every // len(CRASHES)
    return range(first, len(crashed(plan).journal) + 1, every)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("sampler", [SYNCHRONOUS, LOOKING_AHEAD], ids=["synchronous", "ahead"])
def test_in_order_a_crash_at_any_record_leads_to_the_same_steps_and_weights(
    sampler: dict[str, Any], crash: str, every: int
) -> None:
    plan = plan_with(sampler)
    once = ([PlannedFault(crash, at_record=at)] for at in records_of(plan, every, crash))
    assert differences(plan, once) == {}


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("crash", CRASHES)
def test_so_does_a_second_crash_in_the_middle_of_taking_over(crash: str, every: int) -> None:
    plan = plan_with(SYNCHRONOUS)
    twice = (
        [
            PlannedFault("controller_killed", at_record=at),
            PlannedFault(crash, at_record=at + 1 + at % 8),
        ]
        for at in records_of(plan, every, crash)[:-4]
    )
    assert differences(plan, twice) == {}


def test_crashes_lose_anything_from_nothing_to_all_that_was_not_synced() -> None:
    plan = plan_with(SYNCHRONOUS)
    lost = [
        lost_records(crashed(plan, PlannedFault("controller_killed", at_record=at)), at)
        for at in records_of(plan, every=21)
    ]
    assert min(lost) == 0 and max(lost) > GROUPS_PER_STEP
    assert 0 < sum(each > 0 for each in lost) < len(lost)


# --- whatever is ready -------------------------------------------------------------------------------


@pytest.mark.parametrize("every", EVERY_THIRD)
@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("sampler", UNORDERED, ids=lambda sampler: sampler["name"])
def test_out_of_order_a_crash_loses_no_prompt_and_breaks_no_invariant(
    sampler: dict[str, Any], crash: str, every: int
) -> None:
    prompts = STEPS * GROUPS_PER_STEP - 1  # the last step is short: whatever is left is trained
    plan = plan_with(sampler, prompts)
    found = dict[int, str]()
    for record in records_of(plan, every, crash):
        result = crashed(plan, PlannedFault(crash, at_record=record))
        trained = sorted(itertools.chain(*prompt_indices_of(steps_of(result))))
        drawn = sorted(each.prompt_index for each in result.journal if isinstance(each, Admitted))
        problem = problem_of(result)
        if not trained == drawn == list(range(prompts)):
            problem += f" trained {trained}, drawn {drawn}"
        if problem:
            found[record] = problem
    assert found == {}
