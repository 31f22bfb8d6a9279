"""``offbeat verify-weights``. It loads torch only when it runs."""

from pathlib import Path
from typing import Annotated, Final

import typer

from offbeat.launch.commands.arguments import LOOK
from offbeat.messages.exit_codes import FAILED, REFUSED
from offbeat.messages.text import printable_lines

COMMANDS: Final = typer.Typer(rich_markup_mode=None)


@COMMANDS.command("verify-weights", rich_help_panel=LOOK)
def verify_weights(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="Run directory, or checkpoints/state_N of a run."
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", help="Hugging Face directory; default: checkpoints/step_N of the version."
        ),
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Also compare with the engines of the live run.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Seconds to wait for the engines.")
    ] = 60.0,
) -> None:
    """Find the first weight that export, wire or load changed. Exit code 1: a weight differs."""
    from offbeat.plugins.verify_weights.legs import legs_or_exit

    legs = legs_or_exit(what, against, engine=engine, wait_s=wait_s)
    for each in legs:
        typer.echo(printable_lines(str(each)), err=not each.is_equal)
    if any(each.difference is not None for each in legs):
        raise typer.Exit(FAILED)
    if any(each.was_asked and not each.is_equal for each in legs):
        raise typer.Exit(REFUSED)
