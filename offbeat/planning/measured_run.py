"""Times of a run, read from its directory: what the planner starts from.

The pace of an engine is fitted: a group takes ``longest * (alone + shared * n)`` seconds in it, of
the tokens of its longest sample and the ``n`` sequences that decoded beside it. Where tokens
explain little of the times, as with tools or an engine that is a stand-in, the seconds themselves
are drawn from, and do not depend on what else decodes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import EmbeddedGeneratorConfig, VllmGeneratorConfig
from offbeat.config.sections.trainer import StubTrainerConfig
from offbeat.controller.events import AnyEvent, Committed, Dispatched, Released, Returned, Served
from offbeat.messages.groups import Receipt
from offbeat.planning.prediction import NotPlanned, Pace, pace_of, trainer_seconds
from offbeat.planning.virtual_ports import Costs, GroupWork
from offbeat.runs.directory import CONFIG
from offbeat.runs.report.steps import AppliedSteps, read_metrics_file
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
            case trainer, EmbeddedGeneratorConfig() | VllmGeneratorConfig() as engines:
                return trainer.device == engines.device == "cpu"
            case _:
                return False


class _Group(msgspec.Struct):
    """One group in its engine, by the journal's times."""

    receipt: Receipt
    began_s: float
    ended_s: float
    engine: str


def measured_run(run_dir: Path) -> MeasuredRun:
    """Read the times of a run, of a part of it if it is long.

    Raises:
        NotPlanned: It has not trained enough steps.
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
    work, alone, shared, explained = _fitted(groups, config.samples_per_group)
    metrics = read_metrics_file(run_dir / "metrics.jsonl").by_version.values()
    pauses = [each.metrics["sync/pause_s"] for each in metrics if "sync/pause_s" in each.metrics]
    seconds = trainer_seconds(journal.aggregates)
    trainer = {name: spent_s / len(steps) for name, spent_s in seconds.items()}
    costs = Costs(
        alone=alone,
        shared=shared,
        step_s=sum(trainer.get(each, 0.0) for each in _WORK),
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
    return MeasuredRun(config, pace, costs, work, explained)


_WORK: Final = (TrainerTime.COMPUTE, TrainerTime.CALLS, TrainerTime.CONTROLLER, TrainerTime.OTHER)
_NOT_PLANNED: Final = (TrainerTime.CHECKPOINT, TrainerTime.INCIDENT, TrainerTime.WAITING_GATE)


def _slots(config: RunConfig) -> int | None:
    """Return how many sequences an engine decodes at once; None: any number."""
    match config.generator:
        case EmbeddedGeneratorConfig() | VllmGeneratorConfig():
            return config.generator.max_sequences
        case _:
            return None


def _groups(journal: RunJournal) -> tuple[list[_Group], float]:
    """Return groups of the settled part of the run, and the time from a release until it is served."""
    groups, loads = list[_Group](), list[float]()
    for stretch in journal.stretches(_RECORDS):
        begun = journal.state_before(stretch.start)
        if begun is None:
            continue
        dispatched = dict[int, tuple[float, str]]()
        released: Released | None = None
        for _, event in journal.events(stretch, begun.ledger):
            released = _note(event, dispatched, groups, loads, released)
    settled = groups[int(_SETTLED * len(groups)) :]
    if not settled:
        raise NotPlanned("the run has no finished group", "Name a run that has trained some steps")
    return settled, float(np.median(loads)) if loads else 0.0


def _note(
    event: AnyEvent,
    dispatched: dict[int, tuple[float, str]],
    groups: list[_Group],
    loads: list[float],
    released: Released | None,
) -> Released | None:
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
            return event
        case Served() if released is not None and released.version == event.version:
            loads.append(max(0.0, event.unix_s - released.unix_s))
        case _:
            pass
    return released


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
