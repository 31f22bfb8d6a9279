"""Defines ``offbeat watch``: the page of ``offbeat report``, live."""

from pathlib import Path
from typing import Annotated, Final

import typer

from offbeat.launch.commands.arguments import LOOK, error_in_one_line

COMMANDS: Final = typer.Typer(rich_markup_mode=None)


@COMMANDS.command(rich_help_panel=LOOK)
def watch(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS_DIR", help="Directory of runs, or of one run.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; default: only this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0: any free port.")
    ] = 0,
) -> None:
    """Serve live pages of all runs in a directory, like offbeat report. Ctrl-C ends the server."""
    from offbeat.plugins.watch.server import serve

    with error_in_one_line():
        serve(runs, host, port)
