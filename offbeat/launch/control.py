"""Sends commands to a live run through its run directory, over any shared file system.

``offbeat control`` writes a file. The driver, which polls its run twice per second, removes the
file and passes the command to the controller. Only one side can remove the file: the driver to
execute the command, or the operator's process to withdraw it after a timeout.
"""

import contextlib
import math
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from offbeat.controller.commands import Abort, Command, Pause, Resume, Stop
from offbeat.runs.directory import CONFIG, SUMMARY, RunDirUnusable

log = structlog.stdlib.get_logger()
INBOX: Final = "control"
COMMANDS: Final[dict[str, Command]] = {
    "pause": Pause(),
    "resume": Resume(),
    "stop": Stop(),
    "abort": Abort("an operator asked"),
}
_LOOK_S: Final = 0.1


def check_live(run_dir: Path, fix_if_ended: str) -> None:
    """Raise if a directory holds no run, or a run that has ended.

    Raises:
        RunDirUnusable: The directory holds no live run.
    """
    if not (run_dir / CONFIG).exists():
        raise RunDirUnusable(str(run_dir), "it holds no run", "Name the directory of a live run")
    if (run_dir / SUMMARY).exists():
        raise RunDirUnusable(str(run_dir), "its run has ended", fix_if_ended)


def leave(run_dir: Path, command: Command) -> Path:
    """Write a command for the driver of this run and return the path of its file.

    Raises:
        RunDirUnusable: This is not the directory of a live run, or it cannot be written.
    """
    check_live(run_dir, f"See {SUMMARY}; offbeat train --resume {run_dir} resumes it")
    inbox = run_dir / INBOX
    staged = inbox / f".{secrets.token_hex(4)}"
    file = (
        inbox
        / f"{time.time_ns():020d}-{type(command).__name__.lower()}-{secrets.token_hex(2)}.json"
    )
    try:
        inbox.mkdir(exist_ok=True)
        staged.write_bytes(msgspec.json.encode(command))
        staged.rename(file)
    except OSError as error:
        fix = "Ask on the machine that runs it"
        raise RunDirUnusable(str(run_dir), error.strerror or str(error), fix) from error
    return file


def was_taken(command: Path, *, within_s: float) -> bool:
    """Wait for the driver to accept the command.

    Return False if the driver did not accept it and the command was withdrawn.
    """
    give_up_at = time.monotonic() + within_s
    while command.exists():
        if time.monotonic() >= give_up_at:
            try:
                command.unlink()
            except FileNotFoundError:
                return True  # accepted just before the withdrawal
            return False
        time.sleep(_LOOK_S)
    return True


def take_commands(run_dir: Path) -> list[bytes]:
    """Remove and return the commands written since the last call, oldest first.

    Errors of the file system do not end the run: a later call finds the remaining commands.
    """
    found = list[bytes]()
    try:
        for file in sorted((run_dir / INBOX).glob("*.json")):
            with contextlib.suppress(FileNotFoundError):  # withdrawn meanwhile
                command = file.read_bytes()
                file.unlink()
                found.append(command)
    except OSError as error:
        log.warning("control.unreadable", error=str(error))
    return found


class CommandInbox:
    """Commands for a run, from an operator or from the run's wall-clock limit."""

    def __init__(
        self, run_dir: Path, limit_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Add a stop command after ``limit_s`` seconds from now, or never if that is None."""
        self.given = list[bytes]()
        """All commands so far. A restarted controller needs the earlier commands, too."""
        self._run_dir, self._limit_s, self._clock = run_dir, limit_s, clock
        self._stop_at = math.inf if limit_s is None else clock() + limit_s

    def take_commands(self) -> list[bytes]:
        """Return the commands since the last call, oldest first."""
        orders = take_commands(self._run_dir)
        if self._clock() >= self._stop_at:
            log.info("run.time_is_up", wall_clock_limit_s=self._limit_s)
            reason = f"supervision.wall_clock_limit_s={self._limit_s:g}"
            orders.append(msgspec.json.encode(Stop(reason)))
            self._stop_at = math.inf
        self.given += orders
        return orders
