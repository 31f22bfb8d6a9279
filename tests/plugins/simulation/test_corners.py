"""Corners: in one episode of twenty the settings and faults coincide in which runs have stalled."""

import random
from pathlib import Path

import pytest

from offbeat.config.limits import max_group_bytes
from offbeat.config.loader import load_recipe
from offbeat.config.sections.sampler import InOrderConfig
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.corners import MACHINE, draw_corner
from offbeat.plugins.simulation.draws import EpisodePlan, draw_plan
from offbeat.plugins.simulation.episode import run_episode

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
BASE = load_recipe(QUICKSTART).config
SEEDS = range(400)
CORNERS = [
    seed
    for seed in SEEDS
    if draw_corner(random.Random(f"{seed}/corner"), "all", 1, steps=12).faults
]


def buffered_groups(plan: EpisodePlan) -> float:
    """Return the groups of the largest size that the buffer of an episode holds."""
    buffer = plan.config.buffer
    by_bytes = buffer.capacity_mib * 2**20 / max_group_bytes(plan.config)
    return min(by_bytes, buffer.capacity_groups or by_bytes)


def test_one_episode_of_twenty_is_a_corner() -> None:
    assert 0.03 < len(CORNERS) / len(SEEDS) < 0.07


@pytest.mark.parametrize("seed", CORNERS[:12])
def test_in_a_corner_in_order_looks_ahead_the_buffer_is_tight_and_the_workers_machine_dies(
    seed: int,
) -> None:
    plan = draw_plan(seed, BASE, "all", None)
    sampler, step = plan.config.sampler, plan.config.groups_per_step
    assert isinstance(sampler, InOrderConfig)
    assert sampler.max_lookahead
    assert step <= buffered_groups(plan) < 1.5 * step
    workers = [f"environment-{index}" for index in range(plan.workers)]
    assert {plan.machines[worker] for worker in workers} == {MACHINE}
    targets = [fault.target for fault in plan.planned_faults if fault.action.startswith("machine_")]
    assert MACHINE in targets


def test_a_corner_without_faults_keeps_its_settings() -> None:
    plan = draw_plan(CORNERS[0], BASE, "none", None)
    assert isinstance(plan.config.sampler, InOrderConfig)
    assert plan.planned_faults == []


@pytest.mark.parametrize("seed", CORNERS[:4])
def test_the_run_gets_through_a_corner(seed: int) -> None:
    result = run_episode(seed, BASE)
    assert (result.outcome, violations_of(result)) == ("finished", [])
