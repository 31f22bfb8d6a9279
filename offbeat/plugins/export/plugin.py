"""Defines ``offbeat export``: the metrics of a run in the format of another tool."""

from typing import Annotated, Final

import typer

from offbeat.launch.commands.arguments import LOOK, RunArgument, error_in_one_line, refuse

COMMANDS: Final = typer.Typer(rich_markup_mode=None)


@COMMANDS.command(rich_help_panel=LOOK)
def export(
    run: RunArgument,
    to: Annotated[
        str, typer.Option("--to", help="Format: csv, parquet, mlflow, tensorboard or wandb.")
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="File, directory or (mlflow) tracking URI; default: inside the run directory.",
        ),
    ] = None,
    x_axis: Annotated[
        str, typer.Option("--x-axis", help="steps; tensorboard also has samples.")
    ] = "steps",
) -> None:
    """Convert a run's metrics to another tool's format. Reads only the run directory."""
    from offbeat.plugins.export.exporting import counts_samples, tools
    from offbeat.plugins.export.exporting import export as exported

    if to not in tools():
        refuse(f"--to {to}: no such format. Use one of {', '.join(tools())}.")
    if x_axis not in {"steps", "samples"}:
        refuse(f"--x-axis {x_axis}: no such axis. Use steps or samples.")
    if x_axis == "samples" and not counts_samples(to):
        able = ", ".join(filter(counts_samples, tools()))
        refuse(f"--x-axis samples needs --to {able}; --to {to} has only steps.")
    with error_in_one_line():
        written = exported(run, to, output, in_samples=x_axis == "samples")
    typer.echo(f"{written.where}  {written.steps:,} steps of {written.metrics} metrics")
    if written.unreadable_lines:
        typer.echo(
            f"left out: {written.unreadable_lines} lines of metrics.jsonl that are not records"
        )
    if written.look:
        typer.echo(f"to see it: {written.look}")
