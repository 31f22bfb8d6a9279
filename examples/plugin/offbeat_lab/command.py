"""``offbeat lines RUN``: print the lines that the tracker wrote."""

from pathlib import Path
from typing import Annotated, Final

import typer

COMMANDS: Final = typer.Typer()


@COMMANDS.command()
def lines(run: Annotated[Path, typer.Argument(help="Directory of a run.")]) -> None:
    """Print the lines of a run."""
    typer.echo((run / "lines.txt").read_text(encoding="utf-8"), nl=False)
