"""``offbeat watch``: serves the live page until Ctrl-C."""

from pathlib import Path
from typing import Final

import typer

from offbeat.messages.failures import FixableError
from offbeat.runs.directory import JOURNAL
from offbeat.runs.nearby_runs import run_around, runs_below, what_to_name
from offbeat.runs.watch.runs import WatchedRuns
from offbeat.runs.watch.server import WatchServer

_EVERY_ADDRESS: Final = ("0.0.0.0", "::", "")  # noqa: S104  refused
"""Hosts that are refused: the server compares the host name of a request, and these match none."""


class CannotWatch(FixableError):
    """The live page cannot be served."""


def check_runs_are_here(directory: Path) -> None:
    """Check that a directory is a run, holds runs, or may get the first one.

    Raises:
        CannotWatch: It is no directory, it lies in a run, or runs are further down only.
    """
    if not directory.is_dir():
        problem = "a file" if directory.exists() else "no such directory"
        raise CannotWatch(
            str(directory), problem, f"{what_to_name(directory)}, or the directory of runs"
        )
    if (directory / JOURNAL).is_dir():
        return
    if run_around(directory) is not None:
        raise CannotWatch(str(directory), "a folder of a run", what_to_name(directory))
    below = runs_below(directory)
    if below and below[0].parent != directory:
        fix = f"Name the directory of runs, {below[0].parent}"
        raise CannotWatch(str(directory), "no run lies directly in it", fix)


def serve(directory: Path, host: str, port: int) -> None:
    """Print the address, and serve the runs of a directory until Ctrl-C.

    Raises:
        CannotWatch: The directory is none of runs, or the address cannot be listened on.
    """
    check_runs_are_here(directory)
    if host in _EVERY_ADDRESS:
        fix = "Name the one that a browser will open"
        raise CannotWatch(f"--host {host}", "it stands for every address", fix)
    try:
        server = WatchServer(host, port, WatchedRuns.at(directory))
    except OSError as error:
        problem = error.strerror or str(error)
        raise CannotWatch(f"{host}:{port}", problem, "Name another --port or --host") from error
    typer.echo(f"{server.url}\nCtrl-C ends it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
