"""Draws the config of an episode from a seed. Depends on the option ``images``.

Draws how the weights of an episode travel, from which trainer ranks, and the faults of these ranks.

Encoder ranks and their faults have separate random numbers. All other draws of an episode are
the same with and without them.
"""

import random
from copy import deepcopy
from typing import Any, Final

import msgspec

from offbeat.config.limits import find_encoder, max_group_bytes, max_reward_calls, shares_weights
from offbeat.config.run import RunConfig
from offbeat.config.trainer_parts import model_is_frozen
from offbeat.controller.recovery import GROUPS_PER_TURN
from offbeat.plugins.simulation.corners import (
    LONE_LOSS_SETTINGS,
    Corner,
    draw_corner,
    draw_lone_loss,
)
from offbeat.plugins.simulation.faults import (
    KINDS,
    MACHINES,
    draw_faults,
    draw_machine_faults,
    draw_outage,
    draw_poison,
    draw_reshard_faults,
    draw_rewind_crash,
    draw_step_end_crash,
)
from offbeat.plugins.simulation.machines import place_actors
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.plugins.simulation.source_layout import SourceLayout, rank_name

DELTA_SHARE: Final = 0.5
"""Share of the episodes in which engines receive releases as deltas."""

RESHARD_SHARE: Final = 0.2
"""Share of the episodes in which every trainer rank sends its part of the weights."""

LAYOUTS: Final = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (2, 2), (1, 3))
"""Shards of the language model, and copies of each, in such an episode."""

ENCODERS_SHARE: Final = 0.25
"""Share of the episodes with encoder ranks, if the recipe does not ask for any."""

ENCODERS: Final = (1, 1, 2)
"""Numbers of encoder ranks in such an episode."""

ENCODER_FAULTS: Final = ("rank_killed", "rank_frozen", "bucket_lost")
"""Faults of an encoder rank while it sends. One of them strikes in half of these episodes."""

_RESHARD: Final = {"chunk_mib": 16.0, "slowest_mib_s": 1000.0, "slack_s": 0.75}
"""Limits of a fetch. Four of them are less than the deadline of a sync."""


def draw_transport(ranks: random.Random, seed: int, base: RunConfig) -> dict[str, Any]:
    """Return how weights travel: from every rank in one episode of five, or as the recipe says."""
    if model_is_frozen(base):
        return {}
    delta = {"delta": random.Random(f"{seed}/delta").random() < DELTA_SHARE}
    if base.sync.ranks_send or ranks.random() < RESHARD_SHARE:
        return {"transport": "reshard", **delta, **_RESHARD}
    return delta


def draw_senders(
    ranks: random.Random, seed: int, profile: str, config: RunConfig
) -> tuple[SourceLayout, list[PlannedFault]]:
    """Return the ranks that send the weights of an episode, and their faults meanwhile."""
    encoders = random.Random(f"{seed}/encoders")
    faults, engines = list[PlannedFault](), config.generator.engines
    if config.sync.ranks_send:
        faults = draw_reshard_faults(ranks, profile, steps=config.steps, engines=engines)
    drawn, count = encoders.random() < ENCODERS_SHARE, encoders.choice(ENCODERS)
    encoder_ranks = count if drawn or find_encoder(config.trainer) is not None else 0
    layout = SourceLayout(*ranks.choice(LAYOUTS), encoder_ranks)
    return layout, faults + _encoder_faults(encoders, profile, config, layout)


def _encoder_faults(
    encoders: random.Random, profile: str, config: RunConfig, layout: SourceLayout
) -> list[PlannedFault]:
    """Return a fault of one encoder rank while it sends, in half of the episodes with any."""
    names = [name for name in ENCODER_FAULTS if profile in ("all", KINDS[name].profile)]
    if not config.sync.ranks_send or not layout.encoders or not names:
        return []
    if encoders.random() < 0.5:  # noqa: PLR2004
        return []
    rank = encoders.randrange(layout.language_ranks, layout.ranks)
    at_step = encoders.randint(0, max(0, config.steps - 4))
    delay_s = round(encoders.uniform(0.0, 4.0), 3)
    name = encoders.choice(names)
    return [PlannedFault(name, rank_name(rank), at_step=at_step, delay_s=delay_s)]


MIN_STEPS: Final = 12
MIN_GROUPS_PER_STEP: Final = 8
MIN_ENGINES: Final = 3
SPOOL_LOSS: Final = 0.2
POISON_RETRIES: Final = 4
"""Retries of a group in episodes with poison prompts. More would leave time for nothing else."""
SURPLUS_SHARE: Final = 0.2
"""Share of the episodes in which engines are far faster than the trainer.

The buffer is then always full of finished groups. They are spooled, and most of them become too old
under ``windowed``. The state of these groups must survive a controller's death. Independent draws
rarely combine these settings.
"""
BUDGET_SHARE: Final = 0.1
"""Share of the episodes in which rewards have a budget of calls."""

AGENTS_SHARE: Final = 0.4
ENVIRONMENTS_SHARE: Final = 0.2
IMAGES_SHARE: Final = 0.2
"""Share of the episodes whose prompts have pictures and whose buffer holds only a few of them."""
_TRANSFER: Final = ("transport", "chunk_mib", "slowest_mib_s", "slack_s", "delta")
"""Keys that determine how weights travel."""
UPDATES_SHARE: Final = 0.25
"""Share of the episodes in which samples have several turns and branches, as with agents."""


class EpisodePlan(msgspec.Struct, frozen=True):
    """Complete definition of an episode, except the seed of its random numbers."""

    config: RunConfig
    planned_faults: list[PlannedFault]
    prompts: int | None  # rows of the source; None: endless
    spools: bool  # whether payloads are also written to the run directory
    workers: int
    spool_loss: float = SPOOL_LOSS  # share of the finished groups that are never written to disk
    # Machine by actor, for actors on other machines than the controller's
    machines: dict[str, str] = {}
    groups_per_turn: int = GROUPS_PER_TURN  # groups that a rewind returns at a time
    sample_failures: float = 0.0  # share of the tries of a sample that fail
    several_turns: bool = False  # whether samples may have several turns, and branches
    source_layout: SourceLayout = SourceLayout()


def draw_plan(
    seed: int, base: RunConfig, profile: str, planned_faults: list[PlannedFault] | None
) -> EpisodePlan:
    """Draw the plan of an episode.

    Args:
        seed: Seed of the episode.
        base: Recipe that the draws start from. Sizes larger than an episode needs are reduced.
        profile: Name of the set of faults to draw.
        planned_faults: These faults instead.
    """
    rng = random.Random(f"{seed}/plan")
    changes = _merged(deepcopy(_FIXED), _drawn(rng))
    surplus = rng.random() < SURPLUS_SHARE
    if surplus:
        changes = _merged(changes, _surplus(rng, changes["sampler"]["max_staleness"]))
    poison = draw_poison(random.Random(f"{seed}/poison"), profile, steps=MIN_STEPS)
    if poison and planned_faults is None:
        changes["rollout"]["infrastructure_retries"] = POISON_RETRIES
    if "deterministic" not in type(base.generator).model_fields:
        del changes["generator"]["deterministic"]
    fails, failures = _sample_failures(random.Random(f"{seed}/samples"), profile)
    changes["rollout"] |= failures
    ranks = random.Random(f"{seed}/ranks")
    changes["sync"] |= draw_transport(ranks, seed, base)
    changes["algorithm"] = _updates(random.Random(f"{seed}/updates"))
    environments = _environments(random.Random(f"{seed}/environments"), base)
    if environments:  # each has its own evaluation set
        changes["eval"]["sets"] = {}
        changes["environments"] = environments
    staleness = changes["sampler"]["max_staleness"]
    corner = draw_corner(random.Random(f"{seed}/corner"), profile, staleness, steps=MIN_STEPS)
    changes = _merged(changes, corner.settings(MIN_GROUPS_PER_STEP))
    images = random.Random(f"{seed}/images")
    has_images = images.random() < IMAGES_SHARE or bool(corner.buffer_steps)
    if has_images:
        _give_images(images, base, changes, corner.buffer_steps or (1.0, 1.5, 4.0))
    config = RunConfig.model_validate(_merged(_with_engines(base), _with_one_copy(base, changes)))
    if not (environments or has_images):
        config = _with_reward_budget(random.Random(f"{seed}/rewards"), config)
    needed = config.steps * config.groups_per_step
    prompts = rng.choice((needed - 5, needed + 3)) if rng.random() < 0.2 else None  # noqa: PLR2004
    workers = rng.randint(1, 2)
    names = [f"generator-{index}" for index in range(config.generator.engines)]
    names += ["trainer", *(f"environment-{index}" for index in range(workers))]
    dice = random.Random(f"{seed}/machines")
    machines = place_actors(dice, names) | corner.machines(names[-workers:])
    drawn_profile = profile if planned_faults is None else "none"
    layout, sender_faults = draw_senders(ranks, seed, drawn_profile, config)
    if planned_faults is None:
        planned_faults = _faults(rng, profile, config, workers, surplus=surplus, corner=corner)
        planned_faults += draw_machine_faults(dice, profile, steps=config.steps, machines=machines)
        planned_faults += draw_rewind_crash(random.Random(f"{seed}/rewinds"), profile)
        planned_faults += poison
        planned_faults += draw_outage(random.Random(f"{seed}/outage"), profile, steps=config.steps)
        planned_faults += sender_faults
    spools = rng.random() < 0.5 or surplus  # noqa: PLR2004
    spool_loss = rng.choice((0.0, SPOOL_LOSS)) if surplus else SPOOL_LOSS
    groups_per_turn = random.Random(f"{seed}/turns").choice((1, 8, 20, GROUPS_PER_TURN))
    plan = EpisodePlan(
        extend_deadlines(config, planned_faults),
        planned_faults,
        prompts,
        spools,
        workers,
        spool_loss,
        machines,
        groups_per_turn,
        fails,
        several_turns=random.Random(f"{seed}/agents").random() < AGENTS_SHARE,
        source_layout=layout,
    )
    return plan if corner.faults else _with_lone_loss(seed, drawn_profile, plan)


def _with_one_copy(base: RunConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings. If engines share the weights, leave out the ones that need copies."""
    if not shares_weights(base):
        return changes
    sampler = {**changes["sampler"], "max_staleness": 0}
    if sampler["name"] == "in_order":
        sampler["max_lookahead"] = None
    sync = {name: each for name, each in changes["sync"].items() if name not in _TRANSFER}
    sync |= {"transport": "object_store", "delta": False, "interval": 1}
    return {**changes, "sampler": sampler, "sync": sync}


def _with_lone_loss(seed: int, profile: str, plan: EpisodePlan) -> EpisodePlan:
    """Replace the faults of some plans by the loss of a machine with some engines."""
    engines = [f"generator-{index}" for index in range(plan.config.generator.engines)]
    loss = draw_lone_loss(random.Random(f"{seed}/survivors"), profile, engines, plan.machines)
    if loss is None:
        return plan
    fault, machines = loss
    config = extend_deadlines(_changed(plan.config, LONE_LOSS_SETTINGS), [fault])
    return msgspec.structs.replace(plan, config=config, planned_faults=[fault], machines=machines)


def _faults(
    rng: random.Random,
    profile: str,
    config: RunConfig,
    workers: int,
    *,
    surplus: bool,
    corner: Corner,
) -> list[PlannedFault]:
    """Draw the faults that are not drawn separately; only few if a setting has its own faults."""
    engines = config.generator.engines
    faults = draw_faults(rng, profile, steps=config.steps, engines=engines, workers=workers)
    if surplus and profile in ("all", "controller"):
        # A rewind or a lost engine empties the buffer.
        faults = [*faults[:2], draw_step_end_crash(rng, steps=config.steps)]
    return [*faults[:2], *corner.faults] if corner.faults else faults


def _with_engines(base: RunConfig) -> dict[str, Any]:
    """Return the values of a recipe, with engines added if it has none.

    A controller without engines has one generator that never fails. Engines that may fail include
    that case.
    """
    values, generator = base.model_dump(), base.generator
    if not generator.has_engines:
        sampling = generator.sampling.model_dump()
        values["generator"] |= {"backend": "stub", "sampling": sampling}
    return values


def _sample_failures(rng: random.Random, profile: str) -> tuple[float, dict[str, Any]]:
    """Return, in half of the episodes, a share of tries that fail and the policy for them."""
    if profile not in ("all", "data") or rng.random() < 0.5:  # noqa: PLR2004
        return 0.0, {"on_failed_sample": "fail_group", "min_valid_samples": None}
    policy = rng.choice(("retry", "retry", "mask", "fail_group"))
    if policy == "fail_group":
        return 0.02, {"on_failed_sample": policy, "min_valid_samples": None}
    # Groups are so small that 10 % would sometimes spend the whole drop budget.
    return rng.choice((0.01, 0.04)), {
        "on_failed_sample": policy,
        "sample_retries": rng.choice((0, 1, 1, 2)),
        "min_valid_samples": rng.choice((None, 1, 1)),
    }


def _updates(rng: random.Random) -> dict[str, Any]:
    """Draw several optimizer steps per step, in one episode of four."""
    if rng.random() >= UPDATES_SHARE:
        return {"minibatches": 1, "epochs": 1}
    return {"minibatches": rng.choice((1, 2, 3, 4, 8)), "epochs": rng.choice((1, 1, 2, 3))}


def _environments(rng: random.Random, base: RunConfig) -> dict[str, Any]:
    """Draw two or three environments in one episode of five, if the recipe names none."""
    if base.environments or rng.random() >= ENVIRONMENTS_SHARE:
        return {}
    names = ("first", "second", "third")[: rng.choice((2, 2, 3))]
    environment = base.environment.model_dump()
    return {name: {"weight": rng.randint(1, 4), "environment": environment} for name in names}


def _give_images(
    rng: random.Random, base: RunConfig, changes: dict[str, Any], steps: tuple[float, ...]
) -> None:
    """Add pictures to the prompts of every environment, and buffer room for one of ``steps``."""
    max_mib = rng.choice((0.02, 1.0, 16.0))
    pictures = {"max_mib": max_mib, "max_pictures": 2}
    images: dict[str, Any] = {"name": "digits", "options": {}, "images": pictures}
    if mixed := changes.get("environments", {}):
        for each in mixed.values():
            each["environment"] |= images
    else:
        changes["environment"] = images
    without = RunConfig.model_validate(_merged(_with_engines(base), changes))
    step_bytes = without.groups_per_step * max_group_bytes(without)
    capacity_mib = rng.choice(steps) * step_bytes / 2**20
    changes["buffer"]["capacity_mib"] = capacity_mib * (1 + 1e-6)  # so that rounding costs no byte


_FIXED: Final[dict[str, Any]] = {
    "steps": MIN_STEPS,
    "groups_per_step": MIN_GROUPS_PER_STEP,
    # An undetected error of a release without a canary is not a bug.
    "sync": {"deadline_s": 8.0, "canary_interval": 1},
    "buffer": {"capacity_groups": None, "capacity_mib": 1024.0},
    "rollout": {
        "max_in_flight": None,
        "deadline_s": 15.0,
        "infrastructure_retries": 40,
        "consecutive_failures": 400,
        "drop_budget": 40,
        "min_step_batch_fraction": 0.5,
    },
    "generator": {
        "start_deadline_s": 30.0,
        "restart_budget": 60,
        "min_engines": 1,
        "deterministic": False,
    },
    "trainer": {
        "start_deadline_s": 40.0,
        "step_deadline_s": 10.0,
        "restart_budget": 20,
        "max_steps_not_applied": 5,
    },
    "eval": {
        "path": None,
        "prompts": 3,
        "samples": 1,
        "sets": {"first": {}, "second": {"prompts": 2, "samples": 2}},
        "deadline_s": 8.0,
    },
    "checkpoint": {"keep": 2, "deadline_s": 10.0},
    "supervision": {"stall_timeout_s": 120.0, "controller_restart_budget": 12},
}
"""Settings of every episode: times and budgets in proportion to its faults."""


_PATIENT: Final[dict[str, Any]] = {
    "sync": {"deadline_s": 120.0},
    "rollout": {"deadline_s": 120.0},
    "generator": {"start_deadline_s": 120.0},
    "trainer": {"start_deadline_s": 150.0, "step_deadline_s": 120.0},
    "eval": {"deadline_s": 120.0},
    "checkpoint": {"deadline_s": 120.0},
    "supervision": {"stall_timeout_s": 400.0},
}
"""Settings of an episode that loses a machine. Deadlines outlast the time until the loss is
known."""


def extend_deadlines(config: RunConfig, planned_faults: list[PlannedFault]) -> RunConfig:
    """Return the config with deadlines that fit the faults of the episode."""
    if all(fault.action not in MACHINES for fault in planned_faults):
        return config
    return _changed(config, _PATIENT)


def _with_reward_budget(rng: random.Random, config: RunConfig) -> RunConfig:
    """Return the run, rarely with a judge that has a budget of calls, which may be too small."""
    if rng.random() >= BUDGET_SHARE:
        return config
    judge = {"name": "function", "target": "judge:reward", "reward_retries": rng.randint(0, 1)}
    rows: dict[str, Any] = {"data": {"path": "prompts.jsonl"}}
    if config.eval.interval:
        sets = {name: {"path": "held-out.jsonl"} for name in config.eval.sets}
        rows["eval"] = {"sets": sets} if sets else {"path": "held-out.jsonl"}
    judged = _changed(config, {"environment": judge, **rows})
    calls = max_reward_calls(judged)
    budget = {
        "reward_call_budget": int(
            config.steps * config.groups_per_step * calls * rng.uniform(0.3, 2.0)
        ),
        "on_reward_budget_spent": rng.choice(("fail", "stop")),
    }
    return _changed(judged, {"rollout": budget})


def _drawn(rng: random.Random) -> dict[str, Any]:
    """Draw the settings in which episodes differ."""
    chance = rng.random
    staleness = rng.randint(0, 3)
    # Any version between two syncs counts. More of them than the bound could never be trained.
    interval = rng.randint(1, min(3, staleness + 1)) if chance() < 0.4 else 1  # noqa: PLR2004
    shrinks = chance() < 0.3  # noqa: PLR2004
    return {
        "samples_per_group": rng.choice((2, 2, 3)),
        "seed": rng.randrange(2**31),
        "sampler": _sampler(rng, staleness),
        "sync": {
            "mode": rng.choice(("keep", "keep", "drain", "abort_stale")),
            "interval": interval,
        },
        "rollout": {
            "data_retries": rng.choice((0, 1, 3)),
            "on_dropped_prompt": "shrink" if shrinks else "replace",
        },
        "generator": {"engines": MIN_ENGINES + rng.choice((0, 0, 1, 2))},
        "trainer": {
            "min_tokens_per_chunk": rng.choice((1, 100, None)),
            "step_retries": rng.randint(1, 2),
        },
        "filters": {
            "zero_variance": chance() < 0.25,  # noqa: PLR2004
            "max_truncated_fraction": rng.choice((None, None, None, 0.6)),
        },
        "eval": {
            "interval": (eval_interval := rng.choice((0, 0, 0, 4))),
            "at_start": eval_interval > 0,
        },
        "checkpoint": {
            "interval": rng.randint(1, 6),
            "final": chance() < 0.5,  # noqa: PLR2004
        },
        "stub": {
            "median_rollout_s": rng.choice((0.2, 0.4, 0.8)),
            "tail_sigma": rng.choice((0.4, 0.8, 1.2)),
            "step_s": rng.choice((0.15, 0.4, 1.0)),
            "sync_s": rng.choice((0.03, 0.15, 0.5)),
        },
    }


def _surplus(rng: random.Random, staleness: int) -> dict[str, Any]:
    """Draw settings with which groups are finished far faster than they are trained."""
    changes: dict[str, Any] = {
        "stub": {
            "median_rollout_s": 0.02,
            "tail_sigma": rng.choice((0.0, 0.4, 1.2)),
            "step_s": rng.choice((1.0, 2.0)),
        }
    }
    if rng.random() < 0.7:  # noqa: PLR2004
        changes["sampler"] = _windowed(rng, staleness)
    return changes


def _sampler(rng: random.Random, staleness: int) -> dict[str, Any]:
    name = rng.choice(("in_order", "ready_first", "weight_fifo", "windowed"))
    sampler: dict[str, Any] = {"name": name, "max_staleness": staleness}
    if name == "in_order":
        sampler["max_lookahead"] = rng.choice((None, rng.randint(0, staleness)))
    elif name == "windowed":
        sampler = _windowed(rng, staleness)
    return sampler


def _windowed(rng: random.Random, staleness: int) -> dict[str, Any]:
    return {
        "name": "windowed",
        "max_staleness": staleness,
        "over_sampling_ratio": rng.choice((1.0, 1.5, 2.0, 3.0)),
        "freshest_first": rng.random() < 0.5,  # noqa: PLR2004
        "on_evicted": rng.choice(("readmit", "drop")),
    }


def _changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(_merged(config.model_dump(), changes))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge sections key by key. The sampler is a choice by name, so it is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and key != "sampler":
            merged[key] = {**base.get(key, {}), **value}
        else:
            merged[key] = value
    return merged
