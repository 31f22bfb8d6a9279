"""A run that is cut off at any of its journal's records goes on from there as if nothing had been.

Every record of a run of twenty steps is a crash point. The controller dies there alone, or with the
whole cluster; of what its journal had not synced yet a random part is lost.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import structlog
from oracle import reference, steps_of

from offbeat.config.run import RunConfig
from offbeat.controller.events import AnyEvent, Opened
from offbeat.controller.journal import JournalCorrupt, open_journal, read_journal, recover
from offbeat.controller.journal.frames import HEADER_BYTES, frames
from offbeat.controller.ledger import Ledger
from offbeat.simulation.campaign import violations_of
from offbeat.simulation.draws import Plan
from offbeat.simulation.episode import EpisodeResult, play
from offbeat.simulation.records import TrainerApplied
from offbeat.simulation.schedule import Strike

SEED: Final = 7
STEPS: Final = 20
GROUPS_PER_STEP: Final = 2
CRASHES: Final = ("controller_killed", "cluster_lost")
SYNCHRONOUS: Final = {"name": "in_order", "max_staleness": 0, "max_lookahead": 0}
LOOKING_AHEAD: Final = {"name": "in_order", "max_staleness": 2}
UNORDERED: Final = (
    {"name": "ready_first", "max_staleness": 1},
    {"name": "weight_fifo", "max_staleness": 1},
    {"name": "windowed", "max_staleness": 1, "over_sampling_ratio": 1.5, "freshest_first": True},
)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """What goes wrong here goes wrong on purpose."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


def plan_with(sampler: dict[str, Any], prompts: int | None = None) -> Plan:
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
            "generator": {"engines": 3, "start_deadline_s": 30.0},
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
    return Plan(config, [], prompts, spools=True, workers=2)


def crashed(plan: Plan, *strikes: Strike) -> EpisodeResult:
    return play(SEED, msgspec.structs.replace(plan, strikes=list(strikes)))


def lost_records(result: EpisodeResult, record: int) -> int:
    """Of the unsynced tail, with the controller that died at this record."""
    lives = [place for place, event in enumerate(result.journal) if isinstance(event, Opened)]
    return record - lives[1]


def trained_by_trainer(result: EpisodeResult) -> set[int]:
    return {
        ordinal
        for record in result.records
        if isinstance(record, TrainerApplied)
        for ordinal in record.ordinals
    }


def problem_of(result: EpisodeResult) -> str:
    """What is wrong with a run by itself: it did not finish, or the auditor has something to say."""
    if result.outcome != "finished":
        return f"{result.outcome}: {result.error}"
    return "; ".join(violations_of(result))


# --- in order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("sampler", [SYNCHRONOUS, LOOKING_AHEAD], ids=["synchronous", "ahead"])
def test_in_order_a_crash_at_any_record_leads_to_the_same_steps_and_weights(
    sampler: dict[str, Any], crash: str
) -> None:
    plan = plan_with(sampler)
    whole = crashed(plan)
    expected, weights = [step.ordinals for step in steps_of(whole)], whole.weights
    assert len(expected) == STEPS
    problems, lost = dict[int, str](), list[int]()
    for record in range(1, len(whole.journal) + 1):
        result = crashed(plan, Strike(crash, at_record=record))
        lost.append(lost_records(result, record))
        problem = problem_of(result)
        if result.fired != [crash]:
            problem = f"what fired is {result.fired}"
        elif [step.ordinals for step in steps_of(result)] != expected:
            problem += " other steps"
        elif result.weights != weights:
            problem += " other weights"
        if problem:
            problems[record] = problem
    assert problems == {}
    assert min(lost) == 0 and max(lost) > GROUPS_PER_STEP, "both whole tails and torn ones"
