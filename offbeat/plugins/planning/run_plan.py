"""``offbeat plan``: what other settings would do to a run, by its own times."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from offbeat.config.crosschecks_local import shared_weights_clashes
from offbeat.config.limits import shares_weights
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.plugins.planning.measured_run import MeasuredRun, measured_run
from offbeat.plugins.planning.prediction import PLANNED_KEYS, NotPlanned, Pace, predict
from offbeat.plugins.planning.virtual_ports import Costs, GroupWork
from offbeat.runs.directory import CONFIG

Predict = Callable[[RunConfig, Costs, Sequence[GroupWork]], Pace]
"""``predict``, or what a test puts in its place."""

_STALENESS: Final = (0, 1, 2, 4)
_NEAR_BEST: Final = 0.03  # a smaller staleness is better, as long as it costs no more than this
_BESIDE_OTHERS: Final = (
    "Rows are beside other processes than the run was: compare them with their first one."
)
_UNSURE: Final = 0.15  # of the time of a step; a run that is not predicted better is no basis


class PlannedChange(msgspec.Struct, frozen=True):
    """Predicted pace of the run with other settings, corrected by the error for the run itself."""

    overrides: list[str]
    pace: Pace
    speedup: float  # samples per second, over those that were measured


class RunPlan(msgspec.Struct, frozen=True):
    """A run, the prediction of it, and of what other settings would do to it."""

    run: str
    measured: Pace
    predicted: Pace
    error: float  # of the predicted time of a step, over the measured one
    changes: list[PlannedChange]
    advice: str
    notes: list[str]  # on what the figures rest

    def to_json(self) -> str:
        """Encode as indented JSON with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def to_text(self) -> str:
        """Format as a table, with what it rests on."""
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
    """Predict a run itself, then with ``overrides`` or, without any change, with common ones.

    ``length_scale`` multiplies the groups' lengths; ``length_spread`` the deviation of their
    logarithm from its mean. ``cores`` are what trainer, engines, workers and controller share,
    with ``others``, processes of others that compute all the time: None: as many as in the run.

    Raises:
        NotPlanned: The run has not trained enough steps, or cannot be imitated; an override changes
            nothing that the planner knows.
        ConfigError: An override does not fit.
        NotARun, JournalCorrupt, JournalVersion: As ``RunJournal``.
    """
    _check_cores(cores, others)
    run = measured_run(run_dir, cores)
    asked_config = _with(run_dir, overrides)
    _check_planned(run_dir, overrides)
    base = predict(run.config, run.costs, run.work)
    error = base.step_s / run.pace.step_s - 1
    costs = _beside(run.costs, others)
    work = _reshaped(run.work, length_scale, length_spread)
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
        pace = _corrected(predict(config, costs, work), error)
        speedup = pace.samples_per_s / run.pace.samples_per_s
        changes.append(PlannedChange([*change, *conditions], pace, speedup))
    advice = _advice(run, changes) if others is None else _BESIDE_OTHERS
    notes = list(_notes(run, error))
    return RunPlan(str(run_dir), run.pace, base, error, changes, advice, notes)


def _check_cores(cores: float | None, others: float | None) -> None:
    """Raise NotPlanned if the numbers of cores and of other processes make no sense."""
    if cores is not None and not 1 <= cores < math.inf:
        raise NotPlanned(f"--cores {cores:g} is no number of cores", "Use a number of at least 1")
    if others is not None and cores is None:
        raise NotPlanned(f"--others {others:g} says nothing without --cores", "Add --cores")
    if others is not None and not 0 <= others < math.inf:
        raise NotPlanned(f"--others {others:g} is no number of processes", "Use a number from 0 on")


def _beside(costs: Costs, others: float | None) -> Costs:
    """Return the costs on cores that so many other processes use."""
    if others is None or costs.core_use is None:
        return costs
    return replace(costs, core_use=replace(costs.core_use, others=others))


def _with(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    config = load_recipe(run_dir / CONFIG, list(overrides), dry_run=True).config
    for clash in shared_weights_clashes(config):
        raise NotPlanned(clash.message, clash.hint)
    return config


def _check_planned(run_dir: Path, overrides: Sequence[str]) -> None:
    """Refuse an override that changes no prediction, unless the others do not fit without it.

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
    """Yield the changes that are tried without a request: staleness, step size, engines."""
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


def _corrected(pace: Pace, error: float) -> Pace:
    """Return a predicted pace without the relative error that the run itself was predicted with."""
    return msgspec.structs.replace(
        pace,
        step_s=pace.step_s / (1 + error),
        samples_per_s=pace.samples_per_s * (1 + error),
        trainer_waits_s=pace.trainer_waits_s / (1 + error),
    )


def _reshaped(work: Sequence[GroupWork], scale: float, spread: float) -> list[GroupWork]:
    """Return work of other lengths.

    Raises:
        NotPlanned: A factor is no positive number.
    """
    if not 0 < scale < math.inf or not 0 <= spread < math.inf:
        problem = f"lengths cannot be multiplied by {scale:g}, nor their spread by {spread:g}"
        raise NotPlanned(problem, "Use a scale above 0 and a spread of at least 0")
    logs = [math.log(max(each, 1e-9)) for group in work for each in group.sequences]
    mean = math.fsum(logs) / len(logs)

    def reshaped(length: float) -> float:
        return scale * math.exp(mean + spread * (math.log(max(length, 1e-9)) - mean))

    return [
        GroupWork(
            tuple(map(reshaped, group.sequences)),
            group.outside_s,
            group.prompt_tokens,
            group.response_tokens,
        )
        for group in work
    ]


def _advice(run: MeasuredRun, changes: Sequence[PlannedChange]) -> str:
    """Return a sentence on the smallest staleness that costs next to nothing."""
    own = run.config.sampler.max_staleness
    rates = {own: run.pace.samples_per_s}
    for change in changes:
        key, _, value = (
            change.overrides[0].partition("=") if len(change.overrides) == 1 else ("",) * 3
        )
        if key == "sampler.max_staleness":
            rates[int(value)] = change.pace.samples_per_s
    if len(rates) == 1 and shares_weights(run.config):
        return "sampler.max_staleness stays 0: generator.share_weights needs that."
    if len(rates) == 1:
        return "Without changes, other bounds of staleness, step sizes and numbers of engines are tried."
    best = max(rates.values())
    least = min(bound for bound, rate in rates.items() if rate >= best * (1 - _NEAR_BEST))
    if least == own:
        return f"sampler.max_staleness={own}, as it is, is the least within 3 % of the best speed."
    return f"sampler.max_staleness={least} is the least within 3 % of the best speed."


def _notes(run: MeasuredRun, error: float) -> Iterator[str]:
    """Yield sentences on what a plan of a run rests on, and on what is not in it."""
    if abs(error) > _UNSURE:
        yield (
            f"The planner does not predict this run itself ({error:+.0%} a step), so little rests on "
            "the rest: something that it does not know takes the time."
        )
    use = run.costs.core_use
    if use is not None:
        yield (
            f"Cores: what the trainer computed took {use.slowdown:.1f} times its CPU seconds, as if "
            f"{use.others:.1f} processes of others had shared {use.cores:g} cores."
        )
    elif run.shares_cores:
        yield (
            "Trainer and engines compute on cores: where these are the same ones, what overlaps takes "
            "longer, and a change of staleness, engines or groups brings less than its row says: --cores."
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
