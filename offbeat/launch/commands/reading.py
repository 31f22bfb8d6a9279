"""The commands that read directories of runs, whether live, ended or killed."""

from typing import Annotated

import typer

from offbeat.launch.commands.arguments import LOOK, RunArgument, error_in_one_line
from offbeat.messages.text import printable_json, printable_lines

reading_app = typer.Typer(rich_markup_mode=None)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@reading_app.command(rich_help_panel=LOOK)
def replay(run: RunArgument, as_json: JsonOption = False) -> None:
    """Replay a run's journal and check the run's files. Exit code 1: they differ."""
    from offbeat.runs.replay import replay as replayed

    with error_in_one_line():
        found = replayed(run)
    typer.echo(
        printable_json(found.to_json()) if as_json else printable_lines(found.to_text()), nl=False
    )
    raise typer.Exit(0 if found.agrees else 1)


@reading_app.command(rich_help_panel=LOOK)
def why(
    run: RunArgument,
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="Prompt group: g-000412 or 412.")
    ] = None,
    of_eval: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--eval",
            metavar="SET ROW",
            help="Row of an evaluation set, instead of a group; SET is - for eval.path.",
        ),
    ] = None,
    due: Annotated[
        int | None,
        typer.Option("--due", help="With --eval: weight version of the samples; default: newest."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the history of a prompt group, and why it was trained or dropped."""
    from offbeat.runs.evaluated_row import load_evaluated_row
    from offbeat.runs.why import why as group_history

    if (group is None) == (of_eval is None):
        raise typer.BadParameter("name a GROUP, or --eval SET ROW, and not both")
    if due is not None and of_eval is None:
        raise typer.BadParameter("--due needs --eval SET ROW")
    with error_in_one_line():
        if of_eval is not None:
            history = load_evaluated_row(run, *of_eval, due)
        else:
            history = group_history(run, group or "")
    typer.echo(
        printable_json(history.to_json()) if as_json else printable_lines(history.to_text()),
        nl=False,
    )
