"""Runs ``offbeat sweep``, and prints its points as they come and a table at the end."""

from collections.abc import Sequence
from pathlib import Path

import typer

from offbeat.cli.recipes import read_or_exit
from offbeat.config.loader import resolve_run_dir
from offbeat.messages.exit_codes import FAILED, REFUSED
from offbeat.messages.text import printable_lines
from offbeat.planning.fabricated import LengthLaw, UnusableLengths
from offbeat.planning.sweep import SweepRequest, sweep
from offbeat.planning.sweep_points import SweepPoint, UnusableSweep, table


def sweep_or_exit(
    recipe: Path,
    overrides: Sequence[str],
    over: Sequence[str],
    lengths: str,
    steps: int,
    memory_mib: int | None,
    deadline_s: float,
    out: Path | None,
    *,
    largest: bool,
) -> None:
    """Print the table of a sweep.

    The process ends with code 1 if no point could be measured, with 2 if nothing can be swept.
    """
    loaded = read_or_exit(recipe, overrides)
    try:
        request = SweepRequest(
            recipe,
            tuple(overrides),
            tuple(over),
            LengthLaw.parse(lengths),
            steps,
            memory_mib,
            deadline_s,
            largest,
        )
        file = out or resolve_run_dir(loaded.config).with_suffix(".sweep.jsonl")
        points = sweep(request, loaded, file, _said)
    except (UnusableSweep, UnusableLengths) as error:
        typer.echo(printable_lines(str(error)), err=True)
        raise typer.Exit(REFUSED) from None
    typer.echo(printable_lines(f"\n{table(points)}\n{file}"))
    if all(point.outcome != "ok" for point in points):
        raise typer.Exit(FAILED)


def _said(point: SweepPoint) -> None:
    what = f"{point.step_s:.3g} s/step" if point.outcome == "ok" else point.outcome
    line = f"{' '.join(point.settings) or 'the recipe'}: {what}"
    typer.echo(printable_lines(line), err=True)
