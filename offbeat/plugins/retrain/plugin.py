"""Defines ``offbeat retrain``. It loads torch only when it runs."""

from pathlib import Path
from typing import Annotated, Final

import typer

from offbeat.launch.commands.arguments import (
    LOOK,
    OverridesArgument,
    RecipeCommand,
    RunArgument,
    error_in_one_line,
    refuse,
)
from offbeat.messages.exit_codes import FAILED
from offbeat.messages.text import printable_lines

COMMANDS: Final = typer.Typer(rich_markup_mode=None)


@COMMANDS.command(cls=RecipeCommand, rich_help_panel=LOOK)
def retrain(
    run: RunArgument,
    overrides: OverridesArgument = None,
    from_step: Annotated[
        int, typer.Option("--from", min=0, help="Version to start at; 0: the initial model.")
    ] = 0,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps to train after it; default: all recorded ones."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="New directory for metrics.jsonl; default: RUN-retrain."),
    ] = None,
) -> None:
    """Train recorded groups of a run again, without engines and environments.

    Without settings, it compares each step with the record bit for bit; exit code 1: a step
    differs. With settings for the loss or the optimizer, it shows recorded and new values side by
    side. It runs the code that the recipe names.
    """
    from offbeat.config.problems import ConfigError

    def say(line: str) -> None:
        typer.echo(printable_lines(line))

    with error_in_one_line():
        from offbeat.plugins.retrain.settings import read_settings

        try:
            settings = read_settings(run, overrides or [])
        except ConfigError as error:
            refuse(error)

        from offbeat.plugins.retrain.retraining import retrain_run

        difference = retrain_run(run, settings, from_step, steps, out, say)
    if difference:
        typer.echo(printable_lines(f"DIFFERS: {difference}"), err=True)
        raise typer.Exit(FAILED)
