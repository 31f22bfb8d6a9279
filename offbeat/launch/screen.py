"""Standard output and error as a run uses them: telling may fail, the run goes on."""

import io
import os
from typing import TextIO, cast

from rich.console import Console


def screen(stream: TextIO | None) -> Console:
    """A console that never raises for its stream; None, a stream closed before us: a silent one."""
    return (
        Console(quiet=True)
        if stream is None
        else Console(file=cast("TextIO", BestEffortStream(stream)))
    )


class BestEffortStream(io.TextIOBase):
    """A text stream that falls silent once the one below it fails.

    ``| head`` has read enough, a terminal is gone, a log's disk is full: none of them ends a run.
    From then on the file descriptor leads nowhere, so that what is still buffered does not fail
    either, when the process ends.
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
