"""The commands that read run directories: of runs that go on, ended or were killed."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.arguments import error_in_one_line, refuse
from offbeat.messages.text import printable_lines

reading_app = typer.Typer(rich_markup_mode=None)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


@reading_app.command()
def replay(run: RunArgument, as_json: JsonOption = False) -> None:
    """Fold a run's journal again, and compare it with what the run wrote. 1: they differ."""
    from offbeat.runs.replay import replay as replayed

    with error_in_one_line():
        found = replayed(run)
    typer.echo(found.to_json() if as_json else printable_lines(found.to_text()), nl=False)
    raise typer.Exit(0 if found.agrees else 1)


@reading_app.command()
def why(
    run: RunArgument,
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="A prompt group: g-000412 or 412.")
    ] = None,
    of_eval: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--eval",
            metavar="SET ROW",
            help="Instead of a group, a row of a set of evaluation; SET of eval.path alone is -.",
        ),
    ] = None,
    due: Annotated[
        int | None,
        typer.Option("--due", help="Of --eval: version whose samples to show; default: newest."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the history of a prompt group: drawn, tried, rewarded, trained or dropped, and why."""
    from offbeat.runs.evaluated_row import evaluated_row
    from offbeat.runs.why import why as group_history

    if (group is None) == (of_eval is None):
        raise typer.BadParameter("name a GROUP, or --eval SET ROW, and not both")
    if due is not None and of_eval is None:
        raise typer.BadParameter("--due goes with --eval SET ROW")
    with error_in_one_line():
        if of_eval is not None:
            history = evaluated_row(run, *of_eval, due)
        else:
            history = group_history(run, group or "")
    typer.echo(history.to_json() if as_json else printable_lines(history.to_text()), nl=False)


@reading_app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN2]...", help="Directories of runs; the first in full."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML file; default: report.html in the first run."),
    ] = None,
) -> None:
    """Write one self-contained page on a run: outcome, time line, curves, groups. Opens offline."""
    from offbeat.plugins.report.document import write_report

    with error_in_one_line():
        written = write_report(runs, output)
    typer.echo(f"{written.path}  {written.nbytes / 1e3:,.0f} kB")


@reading_app.command()
def export(
    run: RunArgument,
    to: Annotated[
        str, typer.Option("--to", help="csv, parquet, mlflow or a tracker: tensorboard, wandb.")
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
        str, typer.Option("--x-axis", help="steps or, of tensorboard, samples.")
    ] = "steps",
) -> None:
    """Copy a run's metrics into another tool's format, from the run directory alone."""
    from offbeat.plugins.export.exporting import counts_samples, tools
    from offbeat.plugins.export.exporting import export as exported

    if to not in tools():
        refuse(f"--to {to}: no such format. Use one of {', '.join(tools())}.")
    if x_axis not in {"steps", "samples"}:
        refuse(f"--x-axis {x_axis}: no such axis. Use steps or samples.")
    if x_axis == "samples" and not counts_samples(to):
        able = ", ".join(filter(counts_samples, tools()))
        refuse(f"--x-axis samples is of --to {able}; --to {to} has steps.")
    with error_in_one_line():
        written = exported(run, to, output, in_samples=x_axis == "samples")
    typer.echo(f"{written.where}  {written.steps:,} steps of {written.metrics} metrics")
    if written.unreadable_lines:
        typer.echo(
            f"left out: {written.unreadable_lines} lines of metrics.jsonl that are no records"
        )
    if written.look:
        typer.echo(f"look at it: {written.look}")


@reading_app.command()
def watch(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS_DIR", help="Directory of runs, or one run.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; default: this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 0,
) -> None:
    """Serve the page of offbeat report, live, for all runs of a directory. Ctrl-C ends it."""
    from offbeat.plugins.watch.server import serve

    with error_in_one_line():
        serve(runs, host, port)
