"""Prints the final report of a run: rewards, throughput, and which part waited for what."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.telemetry.applied_steps import WINDOW_STEPS, count_window
from offbeat.telemetry.charts import bar
from offbeat.telemetry.summary import Summary, duration
from offbeat.telemetry.time_accounting import GENERATOR_LABELS, TRAINER_LABELS, tuning

_BAR: Final = 24
_COLOURS: Final = {"finished": "green", "aborted": "yellow", "failed": "red"}


def render_summary(
    summary: Summary,
    paths: Mapping[str, Path] | None = None,
    recipe: Mapping[str, object] | None = None,
    preview: str = "",
) -> RenderableType:
    """Render the final table.

    ``paths`` maps descriptions to the files that the run wrote. ``recipe`` has the recipe's values
    by key. ``preview`` is the command or call that previews the run.
    """
    parts: list[RenderableType] = [_headline(summary, preview), _figures(summary, recipe or {})]
    if summary.staleness_histogram:
        parts += [Text("\nstaleness of the samples trained", style="bold"), _staleness(summary)]
    if summary.trainer_waits or summary.generator_waits:
        parts += [Text("\nwhere the time went", style="bold"), _time(summary)]
    if paths:
        parts += [Text("\nwritten", style="bold"), _paths(paths)]
    return Group(*parts)


def _headline(summary: Summary, preview: str) -> Text:
    text = Text.assemble(
        (summary.outcome, f"bold {_COLOURS[summary.outcome]}"),
        f"  {summary.name}  ",
        (summary.run_id, "dim"),
    )
    if summary.error:
        text.append(f"\n{summary.error}", style="red")
    if summary.ended_by:
        of = f"after {summary.steps} of {summary.steps_asked} steps"
        text.append(f"\nended by {summary.ended_by} {of}")
    if (warning := summary.signal_warning) and summary.outcome != "failed":
        look = f"Look at prompts, answers and rewards{f': {preview}' if preview else '.'}"
        text.append(f"\n{warning} {look}", style="yellow")
    return text


def _figures(summary: Summary, recipe: Mapping[str, object]) -> Table:
    table = _columns()
    _add_learned(table, summary)
    first = f"first after {summary.first_step_s:.1f} s" if summary.first_step_s is not None else ""
    of = f" of {summary.steps_asked}" if summary.steps < summary.steps_asked else ""
    _add(table, "steps", f"{summary.steps}{of} in {duration(summary.wall_s)}", first)
    _add(
        table,
        "speed",
        f"{summary.samples_per_s:,.0f} samples/s",
        f"{summary.tokens_per_s:,.0f} tokens/s",
    )
    if summary.verdict:
        _add(table, "bottleneck", summary.verdict, ", ".join(tuning(summary.verdict, recipe)))
    if syncs := summary.syncs:
        _add(
            table,
            "weights",
            f"{1e3 * syncs.pause_s:,.1f} ms paused",
            f"{1e3 * syncs.transfer_s:,.1f} ms in transfer, {syncs.nbytes / 1e6:,.1f} MB; "
            f"medians of {syncs.count} syncs",
        )
    groups = summary.groups
    _add(table, "groups", f"{groups.trained} trained", f"{groups.drawn} drawn")
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(groups.dropped.items()))
    _add(table, "dropped", str(sum(groups.dropped.values())), dropped)
    if summary.masked_samples:
        _add(table, "masked", _samples(summary.masked_samples), "they failed in groups trained")
    if summary.refused_samples:
        refused = _samples(summary.refused_samples)
        _add(
            table,
            "refused",
            refused,
            "requests of their agents; see agent.request_refused in logs/",
        )
    _add(table, "restarts", *_restarts(summary))
    if summary.resumes:
        _add(table, "resumed", _times(summary.resumes))
    for place, scores in _scores(summary.evaluation):
        version = f"version {summary.evaluation['eval/version']:.0f}"
        _add(table, f"score {place}".strip(), *scores, version)
    if summary.evaluations_failed:
        failed = f"{summary.evaluations_failed} failed"
        _add(table, "evaluations", failed, summary.evaluation_failure)
    if summary.rewinds:
        where = "the trainer went back: offbeat report lists to which version, and why"
        _add(table, "rewound", _times(summary.rewinds), where)
    return table


def _add_learned(table: Table, summary: Summary) -> None:
    """Add the rewards, or the loss of a run without rewards."""
    if summary.reward_first is not None or summary.loss is None:
        last = _number(summary.reward_last)
        window = count_window(summary.steps)
        if summary.steps == 1:
            _add(table, "reward", last)
        else:
            steps = f"steps, means over {window}" if window > 1 else "step"
            rewards = f"{_number(summary.reward_first)} -> {last}"
            _add(table, "reward", rewards, f"first and last {steps}")
    if summary.loss is not None:
        _add(table, "loss", _number(summary.loss), "of the last step")
    for name, reward in summary.reward_by_environment.items():
        _add(table, f"reward {name}", _number(reward), f"mean over the last {WINDOW_STEPS} steps")


def _scores(metrics: Mapping[str, float]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield name, mean reward with its error, and the other scores of each evaluation set."""
    for name in [name for name in metrics if name.endswith("/reward")]:
        place = name.removesuffix("/reward")
        error = metrics.get(f"{name}_se")
        mean = _number(metrics[name]) + (f" ± {error:.3f}" if error is not None else "")
        others = [key for key in metrics if "@" in key and key.rpartition("/")[0] == place]
        shown = [f"{key.rpartition('/')[2]} {metrics[key]:.3f}" for key in others[-2:]]
        yield place.removeprefix("eval").removeprefix("/"), (mean, ", ".join(shown))


def _samples(count: int) -> str:
    return f"{count:,} sample{'s' if count > 1 else ''}"


def _restarts(summary: Summary) -> tuple[str, str]:
    """Return the total number of restarts, and the processes that restarted."""
    counts = {
        "of engines": summary.restarts,
        "of workers": summary.worker_restarts,
        "of the trainer": summary.trainer_restarts,
        "of the controller": summary.controller_incarnations - 1 - summary.resumes,
    }
    counted = [f"{count} {whose}" for whose, count in counts.items() if count]
    if summary.workers_lost:
        counted.append(f"not back: {', '.join(summary.workers_lost)}")
    return str(sum(counts.values())), ", ".join(counted)


def _staleness(summary: Summary) -> Table:
    table = _columns()
    total = sum(summary.staleness_histogram.values()) or 1
    for versions, samples in sorted(summary.staleness_histogram.items()):
        share = samples / total
        _add(table, f"{versions}", bar(share, _BAR), f"{share:6.1%}  {samples} samples")
    return table


def _time(summary: Summary) -> Table:
    table = _columns()
    for who, busy, waits, labels in (
        ("trainer", summary.trainer_busy_fraction, summary.trainer_waits, TRAINER_LABELS),
        ("generators", summary.generator_busy_fraction, summary.generator_waits, GENERATOR_LABELS),
    ):
        rows = {"busy": busy, **dict(sorted(waits.items(), key=lambda item: -item[1]))}
        for name, percent in whole_percents(rows).items():
            _add(
                table,
                f"{who} {labels.get(name, name)}",
                bar(percent / 100, _BAR),
                f"{percent:3d} %",
            )
    return table


def _paths(paths: Mapping[str, Path]) -> Table:
    table = _columns()
    for what, path in paths.items():
        _add(table, what, str(path))
    return table


def whole_percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Round shares to whole percents that sum to 100 exactly when the shares sum to 1.

    All are rounded down, except the ones with the largest remainders, which are rounded up.
    """
    percents = {name: int(share * 100 + 1e-9) for name, share in shares.items()}
    missing = round(sum(shares.values()) * 100) - sum(percents.values())
    by_remainder = sorted(shares, key=lambda name: percents[name] - shares[name] * 100)
    for name in by_remainder[: max(missing, 0)]:
        percents[name] += 1
    return percents


def _columns() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row of plain text. Values of the run are never parsed as markup."""
    table.add_row(*(Text(cell, overflow="fold") for cell in cells))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
