"""The terminal of a run: output that cannot make the run fail, heartbeat, and next commands."""

import io
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO, cast

from rich.console import Console

from offbeat.messages.failures import DeadlineExceeded
from offbeat.telemetry.summary import Summary


def screen(stream: TextIO | None) -> Console:
    """Return a console that raises no errors of its stream. It is silent if the stream is None."""
    return (
        Console(quiet=True)
        if stream is None
        else Console(file=cast("TextIO", BestEffortStream(stream)))
    )


class BestEffortStream(io.TextIOBase):
    """A text stream that discards output once the underlying stream fails.

    A closed pipe, a closed terminal or a full disk do not end a run. After the failure the file
    descriptor is /dev/null, so that buffered text does not fail when the process ends.
    Characters that the stream cannot encode are written as ``?``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # raised before anything is written
            encoding = self._stream.encoding
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except OSError:
            self._silence()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._silence()

    def _silence(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


# A controller that has replied before and is silent this long counts as frozen
_SILENT_S: Final = 60.0
_FIRST_ANSWER_S: Final = 300.0  # time for its process to start and to import everything


class HeartbeatTimeout:
    """Tracks how long a controller has been silent, and whether that is too long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the timer when the controller starts."""
        self._clock = clock
        self._since, self._limit_s = clock(), _FIRST_ANSWER_S

    def broken(self) -> None:
        """Restart the timer, because the controller has replied."""
        self._since, self._limit_s = self._clock(), _SILENT_S

    def check(self) -> None:
        """Raise if the controller is silent for too long.

        Raises:
            DeadlineExceeded: The controller counts as frozen.
        """
        if self._clock() > self._since + self._limit_s:
            raise DeadlineExceeded("driver", "the controller's status", self._limit_s)


def next_commands(directory: Path, summary: Summary, go_on: str, *, in_python: bool = False) -> str:
    """Return commands on the run in ``directory``, one per line with a description.

    ``go_on`` resumes the run, or is empty if nothing does. It is included if the run ended before
    its last step. With ``in_python``, the lines are Python calls.
    """
    run = repr(str(directory)) if in_python else shlex.quote(str(directory))
    report = f"offbeat.open_run({run}).report()" if in_python else f"offbeat report {run}"
    commands = {"one page": report}
    ended_early = summary.outcome != "finished" or summary.ended_by
    if ended_early and go_on:
        commands["resume"] = go_on
    return "\n".join(["next", *(f"{what:10} {command}" for what, command in commands.items())])
