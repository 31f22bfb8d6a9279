"""Times of a run, read from its directory: what the planner starts from.

The pace of an engine is fitted: a group takes ``longest * (alone + shared * n)`` seconds in it, of
the tokens of its longest sample and the ``n`` sequences that decoded beside it. Where tokens
explain little of the times, as with tools or an engine that is a stand-in, the seconds themselves
are drawn from, and do not depend on what else decodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import ModelGeneratorConfig
from offbeat.config.sections.trainer import StubTrainerConfig
from offbeat.controller.events import Committed, Dispatched, Released, Returned, Served
from offbeat.messages.groups import Receipt
from offbeat.plugins.planning.prediction import NotPlanned, Pace, pace_of, trainer_seconds
from offbeat.plugins.planning.shared_cores import CoreUse
from offbeat.plugins.planning.virtual_ports import Costs, GroupWork
from offbeat.runs.applied_steps import AppliedSteps
from offbeat.runs.directory import CONFIG
from offbeat.runs.metrics_file import read_metrics_file
from offbeat.runs.run_journal import RunJournal
from offbeat.telemetry.time_accounting import TrainerTime

_RECORDS: Final = 100_000  # that are read; a run has three or four for each group
_LEAST_STEPS: Final = 10
_SETTLED: Final = 0.2  # of the steps and groups come before the run has settled
_EXPLAINED: Final = 0.5  # of the variance of the times: tokens that explain less are left out

Floats = NDArray[np.float64]


class MeasuredRun(msgspec.Struct, frozen=True):
    """Recipe, pace and times of a run that has trained some steps."""

    config: RunConfig
    pace: Pace
    costs: Costs
    work: list[GroupWork]
    explained: (
        float  # of the variance of the groups' times, by tokens and load; 0: seconds are drawn
    )

    @property
    def shares_cores(self) -> bool:
        """Return whether trainer and engines compute on cores that may be the same ones."""
        match self.config.trainer, self.config.generator:
            case StubTrainerConfig(), _:
                return False
            case trainer, ModelGeneratorConfig() as engines:
                return trainer.device == engines.device == "cpu"
            case _:
                return False

    def core_use(
        self, cores: float, records: Sequence[Mapping[str, float]], compute_s: float
    ) -> CoreUse:
        """Return how its processes use so many cores; ``records`` are the metrics of its steps.

        Raises:
            NotPlanned: It computes elsewhere, or has no metrics of CPU seconds.
        """
        if not self.shares_cores:
            problem = (
                f"--cores {cores:g} changes nothing: trainer or engines do not compute on the CPU"
            )
            raise NotPlanned(problem, "Leave it out")
        found = {name: [each[name] for each in records if name in each] for name in _CPU}
        if missing := [name for name, values in found.items() if not values]:
            fix = "Plan without --cores, or record some steps again"
            raise NotPlanned(f"--cores needs {', '.join(missing)}, which the run has not", fix)
        cpu_s = {name: float(np.mean(values)) for name, values in found.items()}
        step_s, engines = self.pace.step_s, self.config.generator.engines
        wall_s = WallSeconds(step_s, compute_s, step_s * engines * (1 - self.pace.engines_idle))
        return core_use(cores, cpu_s, wall_s, self.config.groups_per_step)


class WallSeconds(NamedTuple):
    """Seconds of a step by the clock."""

    step: float
    compute: float  # of the trainer
    engines: float  # in which an engine had groups, over all engines


class _Group(msgspec.Struct):
    """One group in its engine, by the journal's times."""

    receipt: Receipt
    began_s: float
    ended_s: float
    engine: str


def measured_run(run_dir: Path, cores: float | None = None) -> MeasuredRun:
    """Read the times of a run, of a part of it if it is long.

    ``cores``: what trainer, engines, workers and controller share; None: each has its own.

    Raises:
        NotPlanned: It has not trained enough steps, or has no CPU seconds although ``cores`` is
            given.
        ConfigError: Its recipe cannot be read.
        NotARun, JournalCorrupt, JournalVersion: As ``RunJournal``.
    """
    journal = RunJournal(run_dir)  # first, for it says of a directory that is no run what it lacks
    config = load_recipe(run_dir / CONFIG, [], dry_run=True).config
    steps = AppliedSteps(journal.aggregates)
    if len(steps) < _LEAST_STEPS:
        problem = f"{run_dir} has trained {len(steps)} steps; at least {_LEAST_STEPS} are needed"
        raise NotPlanned(problem, "Let it go on for some steps, or name another run")
    first = max(1, int(_SETTLED * len(steps)))
    pace = pace_of(journal.aggregates, first, len(steps))
    groups, load_s = _groups(journal)
    groups = groups[int(_SETTLED * len(groups)) :]
    if not groups:
        raise NotPlanned("the run has no finished group", "Name a run that has trained some steps")
    work, alone, shared, explained = _fitted(groups, config.samples_per_group)
    by_version = read_metrics_file(run_dir / "metrics.jsonl").steps
    metrics = [by_version[version] for version in sorted(by_version)]
    pauses = [each.metrics["sync/pause_s"] for each in metrics if "sync/pause_s" in each.metrics]
    seconds = trainer_seconds(journal.aggregates)
    trainer = {name: spent_s / len(steps) for name, spent_s in seconds.items()}
    work_s = sum(trainer.get(each, 0.0) for each in _WORK)
    costs = Costs(
        alone=alone,
        shared=shared,
        step_s=work_s,
        groups=config.groups_per_step,
        publish_s=trainer.get(TrainerTime.SYNC, 0.0) * config.sync.interval,
        load_s=load_s,
        pause_s=min(load_s, float(np.median(pauses)) if pauses else 0.0),
        slots=_slots(config) if explained else None,
        step_grows=not isinstance(config.trainer, StubTrainerConfig),
    )
    lost_s = sum(trainer.get(each, 0.0) for each in _NOT_PLANNED)
    step_s = max(1e-9, pace.step_s - lost_s)
    rate = pace.samples_per_s * pace.step_s / step_s
    pace = msgspec.structs.replace(pace, step_s=step_s, samples_per_s=rate)
    run = MeasuredRun(config, pace, costs, work, explained)
    if cores is None:
        return run
    records = [each.metrics for each in metrics][first:]
    use = run.core_use(cores, records, trainer.get(TrainerTime.COMPUTE, 0.0))
    return msgspec.structs.replace(run, costs=replace(costs, core_use=use))


_CPU: Final = ("cpu/trainer_s", "cpu/controller_s", "cpu/engines_s", "cpu/workers_s")


def core_use(cores: float, cpu_s: Mapping[str, float], wall_s: WallSeconds, groups: int) -> CoreUse:
    """Return how the processes of a run use their cores, by the mean seconds of a step.

    ``cpu_s`` has the metrics of CPU seconds, by name. What the trainer computed took ``slowdown``
    times its CPU seconds, for it shared the cores with the run's other processes, and with as many
    others as make up for the rest.
    """
    trainer, controller, engines, workers = (cpu_s[name] for name in _CPU)
    slowdown = max(1.0, wall_s.compute / trainer if trainer else 1.0)
    own = 1.0 + slowdown * (controller + engines + workers) / wall_s.step
    others = max(0.0, slowdown * cores - own) if slowdown > 1 else 0.0
    duty = min(1.0, slowdown * engines / wall_s.engines) if wall_s.engines else 0.0
    return CoreUse(cores, others, slowdown, trainer + controller, workers / groups, duty)


_WORK: Final = (TrainerTime.COMPUTE, TrainerTime.CALLS, TrainerTime.CONTROLLER, TrainerTime.OTHER)
_NOT_PLANNED: Final = (TrainerTime.CHECKPOINT, TrainerTime.INCIDENT, TrainerTime.WAITING_GATE)


def _slots(config: RunConfig) -> int | None:
    """Return how many sequences an engine decodes at once; None: any number."""
    match config.generator:
        case ModelGeneratorConfig() as engines:
            return engines.max_sequences
        case _:
            return None


def _groups(journal: RunJournal) -> tuple[list[_Group], float]:
    """Return the groups of the run, and the time from a release until it is served."""
    groups, loads = list[_Group](), list[float]()
    for stretch in journal.stretches(_RECORDS):
        begun = journal.state_before(stretch.start)
        if begun is None:
            continue
        dispatched = dict[int, tuple[float, str]]()
        released: Released | None = None
        for _, event in journal.events(stretch, begun.ledger):
            match event:
                case Dispatched():
                    dispatched[event.prompt_index] = event.unix_s, event.engine
                case Returned():
                    dispatched.pop(event.prompt_index, None)
                case Committed():
                    began = dispatched.pop(event.receipt.prompt_index, None)
                    if began is not None:
                        groups.append(_Group(event.receipt, began[0], event.unix_s, began[1]))
                case Released():
                    released = event
                case Served() if released is not None and released.version == event.version:
                    loads.append(max(0.0, event.unix_s - released.unix_s))
                case _:
                    pass
    return groups, float(np.median(loads)) if loads else 0.0


def _fitted(groups: Sequence[_Group], samples: int) -> tuple[list[GroupWork], float, float, float]:
    """Return the work of each group, and the pace: alone, shared, and how much they explain."""
    spent = np.array([each.receipt.generate_s for each in groups])
    longest = np.array([max(each.receipt.response_tokens, default=0) for each in groups], float)
    load = _load(groups) * samples
    alone, shared = pace_per_token(spent, longest, load)
    expected = longest * (alone + shared * load)
    variance = float(((spent - spent.mean()) ** 2).sum())
    explained = 1 - float(((spent - expected) ** 2).sum()) / variance if variance else 0.0
    in_tokens = explained >= _EXPLAINED
    work = [_work(each, in_tokens=in_tokens) for each in groups]
    return (work, alone, shared, explained) if in_tokens else (work, 1.0, 0.0, 0.0)


def pace_per_token(spent: Floats, longest: Floats, load: Floats) -> tuple[float, float]:
    """Fit both times by least squares; neither of them is negative."""
    both = np.linalg.lstsq(np.stack([longest, longest * load], axis=1), spent, rcond=None)[0]
    if both.min() >= 0:
        return float(both[0]), float(both[1])
    one, other = longest, longest * load
    fits = [float(each @ spent / max(each @ each, 1e-12)) for each in (one, other)]
    errors = [
        ((spent - fit * each) ** 2).sum() for fit, each in zip(fits, (one, other), strict=True)
    ]
    return (fits[0], 0.0) if errors[0] <= errors[1] else (0.0, fits[1])


def _load(groups: Sequence[_Group]) -> Floats:
    """Return how many groups its engine had on average while each group was in it."""
    load = np.ones(len(groups))
    for engine in {each.engine for each in groups}:
        own = [number for number, each in enumerate(groups) if each.engine == engine]
        began = np.array([groups[number].began_s for number in own])
        ended = np.array([groups[number].ended_s for number in own])
        times = np.sort(np.concatenate([began, ended]))
        out = np.searchsorted(np.sort(began), times, "right") - np.searchsorted(
            np.sort(ended), times, "right"
        )
        area = np.concatenate([[0.0], np.cumsum(out[:-1] * np.diff(times))])
        spent = np.maximum(ended - began, 1e-9)
        load[own] = np.maximum(
            1.0, (np.interp(ended, times, area) - np.interp(began, times, area)) / spent
        )
    return load


def _work(group: _Group, *, in_tokens: bool) -> GroupWork:
    receipt = group.receipt
    outside_s = max(0.0, group.ended_s - group.began_s - receipt.generate_s)
    lengths = tuple(float(tokens) for tokens in receipt.response_tokens)
    return GroupWork(
        lengths if in_tokens else (receipt.generate_s,),
        outside_s,
        round(sum(receipt.prompt_tokens) / max(1, receipt.samples)),
        max(1, round(sum(receipt.response_tokens) / max(1, receipt.samples))),
    )
