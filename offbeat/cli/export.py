"""``offbeat export``: checks its options, then writes."""

from pathlib import Path
from typing import cast

import typer

from offbeat.messages.exit_codes import REFUSED
from offbeat.runs.export.exporting import TOOLS, Tool, export
from offbeat.runs.past_run import error_in_one_line


def export_or_exit(run: Path, to: str, output: str | None, x_axis: str) -> None:
    """Export and print where to. Whatever cannot be done: one line and exit code 2."""
    if to not in TOOLS:
        _refuse(f"--to {to}: no such format. Use one of {', '.join(TOOLS)}.")
    if x_axis not in {"steps", "samples"}:
        _refuse(f"--x-axis {x_axis}: no such axis. Use steps or samples.")
    if x_axis == "samples" and to != "tensorboard":
        _refuse(f"--x-axis samples is of --to tensorboard; --to {to} has steps.")
    with error_in_one_line():
        written = export(run, cast("Tool", to), output, in_samples=x_axis == "samples")
    typer.echo(f"{written.where}  {written.steps:,} steps of {written.metrics} metrics")
    if written.unreadable_lines:
        typer.echo(
            f"left out: {written.unreadable_lines} lines of metrics.jsonl that are no records"
        )
    if written.look:
        typer.echo(f"look at it: {written.look}")


def _refuse(problem: str) -> None:
    typer.echo(problem, err=True)
    raise typer.Exit(REFUSED)
