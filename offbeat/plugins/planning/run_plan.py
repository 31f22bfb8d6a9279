"""``offbeat plan``: predicts a run with different settings, from the run's own times.

Reads the times of a run from its directory. The planner starts from them.

It fits the pace of an engine: a group needs ``longest * (alone + shared * n)`` seconds. ``longest``
is the tokens of its longest sample, ``n`` the sequences that decoded at the same time. Token counts
may explain little of the times, for example with tools or a stand-in engine. Then the planner draws
from the measured seconds, and assumes that they do not depend on what else is decoded.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.config.crosschecks_local import shared_weights_clashes
from offbeat.config.limits import shares_weights
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import ModelGeneratorConfig
from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.config.sections.trainer import StubTrainerConfig
from offbeat.controller.events import Committed, Dispatched, Released, Returned, Served
from offbeat.messages.groups import Receipt
from offbeat.plugins.planning.prediction import (
    PLANNED_KEYS,
    NotPlanned,
    Pace,
    measure_pace,
    predict,
    trainer_seconds,
)
from offbeat.plugins.planning.shared_cores import CoreUse
from offbeat.plugins.planning.virtual_ports import Costs, GroupWork
from offbeat.runs.applied_steps import AppliedSteps
from offbeat.runs.directory import CONFIG
from offbeat.runs.inputs import find_shipped_code
from offbeat.runs.metrics_file import read_metrics_file
from offbeat.runs.run_journal import RunJournal
from offbeat.telemetry.time_accounting import TrainerTime

_RECORDS: Final = 100_000  # read at most; a run has three or four per group
_LEAST_STEPS: Final = 10
_SETTLED: Final = 0.2  # of the steps and groups, before the run has settled
_EXPLAINED: Final = 0.5  # of the variance of the times; if tokens explain less, they are ignored

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
        """Return whether trainer and engines may compute on the same cores."""
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
        """Return how the run's processes use ``cores``. ``records`` are the metrics of its steps.

        Raises:
            NotPlanned: It does not compute on the CPU, or has no metrics of CPU seconds.
        """
        if not self.shares_cores:
            problem = (
                f"--cores {cores:g} changes nothing: trainer or engines do not compute on the CPU"
            )
            raise NotPlanned(problem, "Leave it out")
        found = {name: [each[name] for each in records if name in each] for name in _CPU}
        if missing := [name for name, values in found.items() if not values]:
            fix = "Plan without --cores, or record some steps again"
            raise NotPlanned(
                f"--cores needs {', '.join(missing)}, which the run does not have", fix
            )
        cpu_s = {name: float(np.mean(values)) for name, values in found.items()}
        step_s, engines = self.pace.step_s, self.config.generator.engines
        wall_s = WallSeconds(step_s, compute_s, step_s * engines * (1 - self.pace.engines_idle))
        return core_use(cores, cpu_s, wall_s, self.config.groups_per_step)


class WallSeconds(NamedTuple):
    """Seconds of a step by the clock."""

    step: float
    compute: float  # of the trainer
    engines: float  # with groups, summed over engines


class _Group(msgspec.Struct):
    """One group in its engine, by the journal's times."""

    receipt: Receipt
    began_s: float
    ended_s: float
    engine: str


def measure_run(run_dir: Path, cores: float | None = None) -> MeasuredRun:
    """Read the times of a run, or of a part of a long run.

    ``cores``: cores that trainer, engines, workers and controller share. None: each has its own.

    Raises:
        NotPlanned: It has not trained enough steps, or has no CPU seconds although ``cores`` is
            given.
        ConfigError: Its recipe cannot be read.
        NotARun, JournalCorrupt, JournalVersion: As ``RunJournal``.
    """
    journal = RunJournal(run_dir)  # first, because its error explains why a directory is not a run
    config = load_recipe(run_dir / CONFIG, [], dry_run=True).config
    _check_code(run_dir, config)
    steps = AppliedSteps(journal.aggregates)
    if len(steps) < _LEAST_STEPS:
        problem = f"{run_dir} has trained {len(steps)} steps; at least {_LEAST_STEPS} are needed"
        raise NotPlanned(problem, "Let it train some more steps, or name another run")
    first = max(1, int(_SETTLED * len(steps)))
    pace = measure_pace(journal.aggregates, first, len(steps))
    groups, load_s = _groups(journal)
    groups = groups[int(_SETTLED * len(groups)) :]
    if not groups:
        raise NotPlanned("the run has no finished group", "Name a run that has trained some steps")
    work, alone, shared, explained = _fit(groups, config.samples_per_group)
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

    ``cpu_s`` has the metrics of CPU seconds, by name. The trainer's work lasted ``slowdown`` times
    its CPU seconds, because it shared the cores with the run's other processes. The rest of the
    slowdown is attributed to ``others``, processes outside of the run.
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
    """Return how many sequences an engine decodes at once, or None for any number."""
    match config.generator:
        case ModelGeneratorConfig() as engines:
            return engines.max_sequences
        case _:
            return None


def _groups(journal: RunJournal) -> tuple[list[_Group], float]:
    """Return the groups of the run, and the median time from release to serving."""
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


def _fit(groups: Sequence[_Group], samples: int) -> tuple[list[GroupWork], float, float, float]:
    """Return the work of each group, both times of the pace, and the variance that they explain."""
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
    """Fit both times by least squares. Neither is negative."""
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
    """Return the mean number of groups in the engine of each group, while that group was in it."""
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


Predict = Callable[[RunConfig, Costs, Sequence[GroupWork]], Pace]
"""``predict``, or a test's replacement."""

_STALENESS: Final = (0, 1, 2, 4)
_NEAR_BEST: Final = 0.03  # prefer a smaller staleness if it costs at most this share of the speed
_BESIDE_OTHERS: Final = (
    "Rows assume different processes than the run had: compare them with their first one."
)
_UNSURE: Final = 0.15  # of a step's time; a larger prediction error makes the plan unreliable


class PlannedChange(msgspec.Struct, frozen=True):
    """Predicted pace of the run with different settings, corrected by the error for the run itself."""

    overrides: list[str]
    pace: Pace
    speedup: float  # samples per second, relative to the measured ones


class RunPlan(msgspec.Struct, frozen=True):
    """A run, its prediction, and the predictions with different settings."""

    run: str
    measured: Pace
    predicted: Pace
    error: float  # of the predicted time of a step, relative to the measured one
    changes: list[PlannedChange]
    advice: str
    notes: list[str]  # about the basis of the figures

    def to_json(self) -> str:
        """Encode as indented JSON with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def to_text(self) -> str:
        """Format as a table, with notes about its basis."""
        rows = [("as it was", self.measured, "measured")]
        rows.append(("the same, predicted", self.predicted, f"{self.error:+.0%} a step"))
        rows += [
            (" ".join(each.overrides), each.pace, f"{each.speedup - 1:+.0%} samples/s")
            for each in self.changes
        ]
        width = max(len(name) for name, _, _ in rows)
        head = f"{'':<{width}}  s/step  samples/s  staleness  trainer waits  engines idle"
        lines = [self.run, head, *(_row(name, pace, note, width) for name, pace, note in rows)]
        return "\n".join([*lines, "", self.advice, *self.notes]) + "\n"


def plan_run(
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    length_scale: float = 1.0,
    length_spread: float = 1.0,
    cores: float | None = None,
    others: float | None = None,
    predict: Predict = predict,
) -> RunPlan:
    """Predict the run itself, then with ``overrides``, or with common changes if none is given.

    ``length_scale`` multiplies the groups' lengths. ``length_spread`` multiplies the deviation of
    their logarithm from its mean. Trainer, engines, workers and controller share ``cores`` with
    ``others``: outside processes that compute all the time. None: as many as in the run.

    Raises:
        NotPlanned: The run has not trained enough steps, or cannot be imitated. Or an override
            changes nothing that the planner knows.
        ConfigError: An override does not fit.
        NotARun, JournalCorrupt, JournalVersion: As ``RunJournal``.
    """
    _check_cores(cores, others)
    run = measure_run(run_dir, cores)
    asked_config = _with(run_dir, overrides)
    _check_planned(run_dir, overrides)
    base = predict(run.config, run.costs, run.work)
    error = base.step_s / run.pace.step_s - 1
    costs = _beside(run.costs, others)
    work = _reshape(run.work, length_scale, length_spread)
    is_reshaped = (length_scale, length_spread) != (1.0, 1.0)
    conditions = [f"lengths x {length_scale:g}, spread x {length_spread:g}"] if is_reshaped else []
    conditions += [] if others is None else [f"others {others:g}"]
    asked = [] if others is None else [(list[str](), run.config)]
    if overrides or (is_reshaped and not asked):
        asked.append((list(overrides), asked_config))
    elif not is_reshaped:
        asked += _common(run_dir, run.config)
    changes = list[PlannedChange]()
    for change, config in asked:
        pace = _correct(predict(config, costs, work), error)
        speedup = pace.samples_per_s / run.pace.samples_per_s
        changes.append(PlannedChange([*change, *conditions], pace, speedup))
    advice = _advice(run, changes) if others is None else _BESIDE_OTHERS
    notes = list(_notes(run, error))
    return RunPlan(str(run_dir), run.pace, base, error, changes, advice, notes)


def _check_cores(cores: float | None, others: float | None) -> None:
    """Raise NotPlanned if the number of cores or of other processes is invalid."""
    if cores is not None and not 1 <= cores < math.inf:
        raise NotPlanned(
            f"--cores {cores:g} is not a number of cores", "Use a number of at least 1"
        )
    if others is not None and cores is None:
        raise NotPlanned(f"--others {others:g} says nothing without --cores", "Add --cores")
    if others is not None and not 0 <= others < math.inf:
        raise NotPlanned(
            f"--others {others:g} is not a number of processes", "Use a number from 0 on"
        )


def _beside(costs: Costs, others: float | None) -> Costs:
    """Return the costs on cores that are shared with ``others`` outside processes."""
    if others is None or costs.core_use is None:
        return costs
    return replace(costs, core_use=replace(costs.core_use, others=others))


def _with(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    config = load_recipe(run_dir / CONFIG, list(overrides), dry_run=True).config
    for clash in shared_weights_clashes(config):
        raise NotPlanned(clash.message, clash.hint)
    _check_code(run_dir, config)
    return config


def _check_code(run_dir: Path, config: RunConfig) -> None:
    """Raise NotPlanned if a custom sampler would be imported from the run directory."""
    if isinstance(config.sampler, CustomSamplerConfig) and (
        problem := find_shipped_code(run_dir, Path.cwd(), config)
    ):
        fix = "Read that code first; to trust it, copy it elsewhere and plan from there"
        raise NotPlanned(problem, fix)


def _check_planned(run_dir: Path, overrides: Sequence[str]) -> None:
    """Refuse an override that changes no prediction, unless the other overrides depend on it.

    Raises:
        NotPlanned: An override names a key that the planner does not know.
    """
    for place, override in enumerate(overrides):
        key = override.partition("=")[0].strip()
        if any(f"{key}.".startswith(f"{known}.") for known in PLANNED_KEYS):
            continue
        if any(known.startswith(f"{key}.") for known in PLANNED_KEYS):
            continue  # a whole section
        try:
            _with(run_dir, [*overrides[:place], *overrides[place + 1 :]])
        except (ConfigError, NotPlanned):
            continue
        fix = f"Leave it out; the plan follows {', '.join(PLANNED_KEYS)}"
        raise NotPlanned(f"{override!r:.60} changes nothing in a plan", fix)


def _common(run_dir: Path, config: RunConfig) -> Iterator[tuple[list[str], RunConfig]]:
    """Yield the changes that are tried by default: staleness, step size, engines."""
    bounds = [each for each in _STALENESS if each != config.sampler.max_staleness]
    groups, engines = config.groups_per_step, config.generator.engines
    tried = [f"sampler.max_staleness={bound}" for bound in bounds]
    tried += [f"groups_per_step={count}" for count in (groups // 2, groups * 2) if count]
    tried += [f"generator.engines={count}" for count in (engines // 2, engines * 2) if count]
    for change in tried:
        try:
            yield [change], _with(run_dir, [change])
        except (ConfigError, NotPlanned):
            continue  # it does not fit the rest of the recipe


def _correct(pace: Pace, error: float) -> Pace:
    """Return a predicted pace, corrected by the relative error of the run's own prediction."""
    return msgspec.structs.replace(
        pace,
        step_s=pace.step_s / (1 + error),
        samples_per_s=pace.samples_per_s * (1 + error),
        trainer_waits_s=pace.trainer_waits_s / (1 + error),
    )


def _reshape(work: Sequence[GroupWork], scale: float, spread: float) -> list[GroupWork]:
    """Return the work with changed lengths.

    Raises:
        NotPlanned: A factor is not a positive number.
    """
    if not 0 < scale < math.inf or not 0 <= spread < math.inf:
        problem = f"lengths cannot be multiplied by {scale:g}, nor their spread by {spread:g}"
        raise NotPlanned(problem, "Use a scale above 0 and a spread of at least 0")
    logs = [math.log(max(each, 1e-9)) for group in work for each in group.sequences]
    mean = math.fsum(logs) / len(logs)

    def reshape(length: float) -> float:
        return scale * math.exp(mean + spread * (math.log(max(length, 1e-9)) - mean))

    return [
        GroupWork(
            tuple(map(reshape, group.sequences)),
            group.outside_s,
            group.prompt_tokens,
            group.response_tokens,
        )
        for group in work
    ]


def _advice(run: MeasuredRun, changes: Sequence[PlannedChange]) -> str:
    """Return a sentence about the smallest staleness that costs almost no speed."""
    own = run.config.sampler.max_staleness
    rates = {own: run.pace.samples_per_s}
    for change in changes:
        key, _, value = (
            change.overrides[0].partition("=") if len(change.overrides) == 1 else ("",) * 3
        )
        if key == "sampler.max_staleness":
            rates[int(value)] = change.pace.samples_per_s
    if len(rates) == 1 and shares_weights(run.config):
        return "sampler.max_staleness stays 0, because generator.share_weights needs that."
    if len(rates) == 1:
        return "Without changes, other bounds of staleness, step sizes and numbers of engines are tried."
    best = max(rates.values())
    least = min(bound for bound, rate in rates.items() if rate >= best * (1 - _NEAR_BEST))
    if least == own:
        return f"sampler.max_staleness={own}, as it is, is the least within 3 % of the best speed."
    return f"sampler.max_staleness={least} is the least within 3 % of the best speed."


def _notes(run: MeasuredRun, error: float) -> Iterator[str]:
    """Yield sentences about the basis of a plan and about costs that it omits."""
    if abs(error) > _UNSURE:
        yield (
            f"The planner does not predict this run itself ({error:+.0%} a step), so do not "
            "rely on the rows: something that it does not model costs time."
        )
    use = run.costs.core_use
    if use is not None:
        yield (
            f"Cores: what the trainer computed took {use.slowdown:.1f} times its CPU seconds, as if "
            f"{use.others:.1f} other processes had shared {use.cores:g} cores."
        )
    elif run.shares_cores:
        yield (
            "Trainer and engines compute on cores. If they share these, overlapping work takes "
            "longer, and changing staleness, engines or groups gains less than its row says. Plan this "
            "with --cores."
        )
    if run.explained:
        yield (
            f"Engines: tokens and sequences side by side explain {run.explained:.0%} of the groups' "
            "times."
        )
    else:
        yield (
            "Engines: tokens do not explain the groups' times, so these are drawn as they were; more "
            "engines or groups do not change them."
        )
    if run.costs.step_grows:
        yield "Trainer: a step's time grows with its groups, but for a tenth."
    else:
        yield "Trainer: a stand-in, whose step takes the same time for any number of groups."
    yield (
        "Not in it: prefill and prefix cache, preemption, memory, checkpoints, evaluations, learning."
    )


def _row(name: str, pace: Pace, note: str, width: int) -> str:
    return (
        f"{name:<{width}}  {pace.step_s:>6.3g}  {pace.samples_per_s:>9.4g}  {pace.staleness:>9.2f}  "
        f"{pace.trainer_waits_s:>11.3g} s  {pace.engines_idle:>12.0%}  {note}"
    )
