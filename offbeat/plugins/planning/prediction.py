"""Prediction of a run: the production controller and sampler on a virtual clock and given times."""

import random
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.ports import NoPayloads, NoTrace, Ports
from offbeat.controller.stats_records import Aggregates
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.failures import OffbeatError
from offbeat.messages.fences import Fence
from offbeat.plugins.planning.shared_cores import SharedCores
from offbeat.plugins.planning.virtual_ports import (
    Costs,
    GroupWork,
    NoMetrics,
    SharedEngine,
    VirtualJournal,
    VirtualRollouts,
    VirtualTrainer,
)
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.plugins.simulation.quiet_log import quiet_log
from offbeat.runs.applied_steps import AppliedSteps
from offbeat.sampler.build import build_sampler
from offbeat.telemetry.time_accounting import TrainerTime

_GROUPS: Final = 2048
_STEPS: Final = (24, 128)
"""Minimum and maximum number of steps of a virtual run that are measured after it has settled."""
_WAITS: Final = (TrainerTime.WAITING_GROUPS, TrainerTime.WAITING_WEIGHTS)
_FOREVER: Final = 1e7  # seconds, of deadlines, because nothing is lost on the virtual clock
_MOST_EVENTS: Final = 20_000_000


PLANNED_KEYS: Final = (
    "groups_per_step",
    "samples_per_group",
    "sampler",
    "sync.mode",
    "sync.interval",
    "rollout.max_in_flight",
    "buffer.capacity_groups",
    "generator.engines",
    "trainer.min_tokens_per_chunk",
)
"""Keys and sections that a virtual run uses. It depends on no others."""


class Pace(msgspec.Struct, frozen=True):
    """Speed of a run, and idle times, per step of its settled part."""

    step_s: float
    samples_per_s: float
    staleness: float  # mean over the samples
    trainer_waits_s: float  # for groups, or for weights to be loaded
    engines_idle: float  # share of the engines' time without any group


class NotPlanned(OffbeatError):
    """A recipe or a run that the planner cannot imitate.

    Fix: plan with a different setting; the last change is the likely cause.
    """

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}"


def predict(config: RunConfig, costs: Costs, work: Sequence[GroupWork]) -> Pace:
    """Return the pace of a run with this recipe and these times. It is deterministic.

    Raises:
        NotPlanned: The virtual run does not end.
    """
    settling = 2 * (config.sampler.max_staleness + 3)
    steps = min(max(_GROUPS // config.groups_per_step, _STEPS[0]), _STEPS[1])
    virtual = _virtual(config, settling + steps + config.sampler.max_staleness + 2)
    loop = VirtualLoop(random.Random(0), max_events=_MOST_EVENTS, max_s=_FOREVER)
    try:
        with quiet_log():
            part = loop.run_until_complete(loop.create_task(_run(virtual, costs, work)))
    except OffbeatError as error:
        fix = "Plan with a different setting; the last change is the likely cause"
        raise NotPlanned(f"the virtual run does not end: {error}", fix) from error
    finally:
        loop.close()
    return measure_pace([part], first=settling, last=settling + steps)


def measure_pace(parts: Sequence[Aggregates], first: int, last: int) -> Pace:
    """Return the pace of a real or virtual run in the steps after ``first`` up to ``last``."""
    steps = AppliedSteps(parts)
    columns, count = steps.columns(), last - first
    elapsed_s = columns["time"][last - 1] - columns["time"][first - 1]
    samples = columns["samples"][last - 1] - columns["samples"][first - 1]
    trainer = trainer_seconds(parts)
    waits = sum(trainer.get(each, 0.0) for each in _WAITS)
    engines = {engine for part in parts for engine in part.engine_busy}
    whole_s = len(engines) * sum(part.ended_unix_s - part.began_unix_s for part in parts)
    busy_s = sum(total_s(each) for part in parts for each in part.engine_busy.values())
    return Pace(
        step_s=float(elapsed_s) / count,
        samples_per_s=float(samples / elapsed_s) if elapsed_s else 0.0,
        staleness=float(np.nanmean(columns["off_policy/staleness_mean"][first:last])),
        trainer_waits_s=waits / len(steps),
        engines_idle=max(0.0, 1 - busy_s / whole_s) if whole_s else 0.0,
    )


def trainer_seconds(parts: Sequence[Aggregates]) -> dict[str, float]:
    """Return the attributed seconds of the trainer by category."""
    totals = dict[str, float]()
    for part in parts:
        for category, seconds in part.trainer_s.items():
            totals[category] = totals.get(category, 0.0) + total_s(seconds)
    return totals


def total_s(bins: bytes) -> float:
    """Return the seconds in bins of the aggregates."""
    return float(np.frombuffer(bins, "<f4").sum(dtype=np.float64))


async def _run(config: RunConfig, costs: Costs, work: Sequence[GroupWork]) -> Aggregates:
    names = [f"generator-{number}" for number in range(config.generator.engines)]
    cores = SharedCores(costs.core_use)
    engines = {name: SharedEngine(name, costs, cores) for name in names}
    journal = VirtualJournal()
    controller = Controller(
        config,
        Fence("plan", 1),
        Ports(
            prompts=FakePrompts(),
            rollouts=VirtualRollouts(engines, work, cores, costs.core_use),
            generators=engines,
            trainer=VirtualTrainer(costs, config.groups_per_step, cores),
            journal=journal,
            telemetry=NoMetrics(),
            trace=NoTrace(),
            payloads=NoPayloads(),
        ),
        sampler=build_sampler(config.sampler, config.groups_per_step),
        advantages=lambda rewards, _valid: rewards,
        loss=LossSpec(),
        max_group_bytes=1,
        rng=random.Random(0),
    )
    await controller.run()
    return journal.stats.end_part(1)


def _virtual(config: RunConfig, steps: int) -> RunConfig:
    """Return the recipe without parts that a virtual run does not have.

    Steps, admission, sampler, in-flight limits and sync are kept.
    """
    plain = {
        "steps": steps,
        "groups_per_step": config.groups_per_step,
        "samples_per_group": config.samples_per_group,
        "model": {"path": "none"},
        "environment": {"name": "stub"},
        "sampler": config.sampler.model_dump(),
        "sync": {
            "mode": config.sync.mode,
            "interval": config.sync.interval,
            "deadline_s": _FOREVER,
        },
        "rollout": {"max_in_flight": config.rollout.max_in_flight, "deadline_s": _FOREVER},
        "buffer": {"capacity_mib": 1e9, "capacity_groups": config.buffer.capacity_groups},
        "generator": {"backend": "stub", "engines": config.generator.engines},
        "trainer": {
            "backend": "stub",
            "min_tokens_per_chunk": config.trainer.min_tokens_per_chunk,
            "step_deadline_s": _FOREVER,
        },
        "supervision": {"stall_timeout_s": _FOREVER},
        "checkpoint": {"final": False, "interval": 0},
    }
    return RunConfig.model_validate(plain)
