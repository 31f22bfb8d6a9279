"""``offbeat watch``: serves the live page until Ctrl-C."""

from pathlib import Path
from typing import Final

import typer

from offbeat.messages.failures import OffbeatError
from offbeat.runs.watch.runs import WatchedRuns
from offbeat.runs.watch.server import WatchServer

_EVERY_ADDRESS: Final = ("0.0.0.0", "::", "")  # noqa: S104  refused
"""What a server cannot listen on that compares the name it is asked for."""


class CannotWatch(OffbeatError):
    """The live page cannot be served."""

    what: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}. {self.fix}"


def serve(directory: Path, host: str, port: int) -> None:
    """Print the address, and serve the runs of a directory until Ctrl-C.

    Raises:
        CannotWatch: There is no such directory, or the address cannot be listened on.
    """
    if not directory.is_dir():
        fix = "Name a run, or the directory of runs"
        raise CannotWatch(str(directory), "no such directory", fix)
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
