"""Writes ``status.json``, the current state of a run for readers of its directory."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from offbeat.run_files.disk import replacing


class NamedWait(msgspec.Struct, frozen=True):
    """A wait in progress: for a remote reply, or for a change of the run's state."""

    waiter: str
    target: str
    for_s: float  # seconds waited so far
    deadline_s: float | None  # since the start of the wait; None: the watchdog checks it


class IncidentLine(msgspec.Struct, frozen=True):
    """An event that a user wants to know of, in words."""

    number: int  # from 1, of one controller
    step: int  # in progress
    text: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Status that the controller reports about twice a second.

    A figure is None until it is known.
    """

    step: int  # optimizer steps done
    steps: int  # optimizer steps of the run
    phase: str
    reward: float | None = None  # mean over the last 20 steps
    reward_recent: tuple[float, ...] = ()  # rewards of these steps, oldest first
    loss: float | None = None  # loss of the last step, in a run without rewards
    staleness_mean: float | None = None  # mean over the last step
    staleness_max: int | None = None
    ready: int = 0  # number of ready groups
    in_flight: int = 0
    trainer_busy: float | None = None  # fraction of time
    generator_busy: float | None = None
    samples_per_s: float | None = None
    verdict: str = ""
    waiting_for: str = ""  # what the run waits for now; empty if nothing
    waits: tuple[NamedWait, ...] = ()  # the longest ones
    elapsed_s: float | None = None  # of all incarnations
    left_s: float | None = None  # at the mean speed so far
    scores: dict[str, float] = {}  # mean rewards of the newest evaluation, by set
    scored_version: int = 0
    incidents: tuple[IncidentLine, ...] = ()  # the newest ones, oldest first


STATUS_FILE: Final = "status.json"
_EVERY_S: Final = 2.0
ALIVE_WITHIN_S: Final = 15.0
"""Maximum age of a live run's file. If it is older, the run was killed or hangs."""
log = structlog.stdlib.get_logger()


class StatusRecord(msgspec.Struct, frozen=True):
    """Content of the file."""

    run_id: str
    unix_s: float  # when it was written
    host: str
    pid: int  # of the driver
    status: Status

    def is_fresh(self, now_unix_s: float) -> bool:
        """Return whether the run was alive a moment ago; tolerates small clock differences."""
        return abs(now_unix_s - self.unix_s) <= ALIVE_WITHIN_S


class StatusFile:
    """Writes the latest status atomically, every two seconds at most.

    The file is not synced to disk, because after a crash it only shows when the run was last alive.
    A failed write is logged and never ends the run.
    """

    def __init__(
        self, run_dir: Path, run_id: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._run_id, self._clock = run_dir / STATUS_FILE, run_id, clock
        self._written_at = float("-inf")
        self._is_refused = False

    def update(self, status: Status) -> None:
        """Write the status, if it is due."""
        now = self._clock()
        if 0 <= now - self._written_at < _EVERY_S:
            return
        self._written_at = now
        record = StatusRecord(self._run_id, now, platform.node(), os.getpid(), status)
        content = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
        try:
            with replacing(self._path) as beside:
                beside.write_bytes(content)
        except OSError as error:
            if not self._is_refused:
                log.warning("status.not_written", path=str(self._path), error=str(error))
            self._is_refused = True
