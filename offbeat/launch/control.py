"""Sends commands to a live run through its run directory, over any file system that it shares.

``offbeat control`` leaves a file; the driver, which looks at its run twice a second anyway, takes it
away and hands it to the controller. The party that removes the file decides: the driver that obeys it, or
the operator who waited long enough.
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


def leave(run_dir: Path, name: str) -> Path:
    """Leave a command for the driver of this run; the file that it takes.

    Raises:
        RunDirUnusable: It is no live run's directory, or cannot be written.
    """
    if not (run_dir / CONFIG).exists():
        raise RunDirUnusable(str(run_dir), "it holds no run", "Name the directory of a live run")
    if (run_dir / SUMMARY).exists():
        fix = f"See {SUMMARY}; offbeat train --resume {run_dir} goes on with it"
        raise RunDirUnusable(str(run_dir), "its run has ended", fix)
    inbox = run_dir / INBOX
    staged = inbox / f".{secrets.token_hex(4)}"
    command = inbox / f"{time.time_ns():020d}-{name}-{secrets.token_hex(2)}.json"
    try:
        inbox.mkdir(exist_ok=True)
        staged.write_bytes(msgspec.json.encode(COMMANDS[name]))
        staged.rename(command)
    except OSError as error:
        fix = "Ask on the machine that runs it"
        raise RunDirUnusable(str(run_dir), error.strerror or str(error), fix) from error
    return command


def was_taken(command: Path, *, within_s: float) -> bool:
    """Wait for the driver to take the command.

    False when it did not and the command was withdrawn.
    """
    give_up_at = time.monotonic() + within_s
    while command.exists():
        if time.monotonic() >= give_up_at:
            try:
                command.unlink()
            except FileNotFoundError:
                return True  # at the last moment
            return False
        time.sleep(_LOOK_S)
    return True


def taken(run_dir: Path) -> list[bytes]:
    """The commands left since the last look, oldest first; each is taken once.

    A file system that refuses is no reason to end a run: what it holds is taken at a later look.
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
    """Holds the commands that a run gets: from an operator, or by its wall-clock limit."""

    def __init__(
        self, run_dir: Path, limit_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``limit_s`` from here on it is ordered to stop; None: never."""
        self.given = list[bytes]()
        """All commands so far: a controller that takes over needs them too."""
        self._run_dir, self._limit_s, self._clock = run_dir, limit_s, clock
        self._stop_at = math.inf if limit_s is None else clock() + limit_s

    def taken(self) -> list[bytes]:
        """Return the commands since the last call, oldest first."""
        orders = taken(self._run_dir)
        if self._clock() >= self._stop_at:
            log.info("run.time_is_up", wall_clock_limit_s=self._limit_s)
            orders.append(msgspec.json.encode(Stop()))
            self._stop_at = math.inf
        self.given += orders
        return orders
