"""Pause, resume, stop and abort while engines and the trainer die, for every policy and sync mode."""

import random
from typing import Any

import pytest

from offbeat.controller.commands import Abort, Command, Pause, Resume, Stop
from offbeat.controller.errors import RunAborted
from offbeat.fakes.receipts import FakePrompts
from tests.support.scenarios import (
    EVERY_SAMPLER,
    SAMPLERS,
    Timed,
    aborted_generation,
    outcome,
    reward_failure,
)
from tests.support.world import World

SEEDS = [
    *range(40),
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(40, 240)),
]


def drawn_world(rng: random.Random) -> World:
    """A run of 8 steps with small deadlines and generous budgets."""
    sampler = SAMPLERS[rng.choice(EVERY_SAMPLER)]
    over_samples = "over_sampling_ratio" in sampler
    config: dict[str, Any] = {
        "sampler": sampler,
        "steps": 8,
        "sync": {"mode": rng.choice(["keep", "drain", "abort_stale"]), "deadline_s": 10},
        "checkpoint": {"interval": rng.choice([0, 2, 3])},
        "trainer": {
            "min_tokens_per_chunk": rng.choice([1, 30]),
            "restart_budget": 50,
            "step_deadline_s": 30,
        },
        "generator": {"restart_budget": 99, "start_deadline_s": 30},
        "rollout": {
            "drop_budget": 50,
            "deadline_s": 30,
            "on_dropped_prompt": rng.choice(["replace", "shrink"]),
        },
        "buffer": {"capacity_groups": None if over_samples else rng.choice([4, 6, None])},
        "eval": {"interval": rng.choice([0, 3]), "prompts": 2},
    }
    world = World(
        config,
        engines=rng.choice([1, 3]),
        prompts=FakePrompts(rng.choice([None, 21, 32])),
        scored=FakePrompts(),
    )
    world.rollouts.slow = {prompt_index: rng.choice([0.2, 1.0, 6.0]) for prompt_index in range(300)}
    for prompt_index in rng.sample(range(60), 12):
        failure = rng.choice([reward_failure, aborted_generation])
        world.rollouts.faults[prompt_index] = [
            failure(prompt_index) for _ in range(rng.choice([1, 2]))
        ]
    return world


def drawn_events(rng: random.Random, world: World, ending: Command | None) -> list[Timed]:
    """Deaths of engines and of the trainer, pauses, and how the run is to end."""

    def control(command: Command) -> Timed:
        return rng.uniform(0.1, 60), lambda: world.built.control(command)

    engines = list(world.generators.values())
    timed: list[Timed] = [
        (rng.uniform(0.1, 60), rng.choice(engines).die) for _ in range(rng.randint(0, 3))
    ]
    timed += [(rng.uniform(0.1, 60), world.trainer.die) for _ in range(rng.randint(0, 2))]
    for _ in range(rng.randint(0, 2)):
        at_s, pause = control(Pause())
        timed += [
            (at_s, pause),
            (at_s + rng.uniform(0, 20), lambda: world.built.control(Resume())),
        ]
    return timed if ending is None else [*timed, control(ending)]


@pytest.mark.parametrize("seed", SEEDS)
def test_commands_and_faults_at_any_moment_end_in_order(seed: int) -> None:
    rng = random.Random(seed)
    world = drawn_world(rng)
    ending = rng.choice([None, None, Stop(), Abort("test")])
    error, _ = outcome(world, *drawn_events(rng, world, ending))
    if error is not None:
        assert isinstance(ending, Abort)
        assert isinstance(error.causes[0], RunAborted)
    ledger = world.built.state.ledger
    counts = ledger.counts()
    live = sum(counts[place] for place in ("admitted", "in_flight", "ready", "training"))
    assert counts["drawn"] == live + counts["trained"] + sum(ledger.totals.dropped.values())
    assert len(world.trained) == len(set(world.trained))
    if error is None and ending is None and world.prompts.count is None:
        assert ledger.trainer_version == 8
    key = "off_policy/staleness_max"
    worst = [record[key] for record in world.telemetry.records if key in record]
    assert max(worst, default=0) <= world.config.sampler.max_staleness
