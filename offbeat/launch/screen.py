"""Standard output and error of a run: errors in writing to them do not end the run."""

import io
import os
from typing import TextIO, cast

from rich.console import Console


def screen(stream: TextIO | None) -> Console:
    """Return a console that never raises for its stream; a silent one if the stream is None."""
    return (
        Console(quiet=True)
        if stream is None
        else Console(file=cast("TextIO", BestEffortStream(stream)))
    )


class BestEffortStream(io.TextIOBase):
    """A text stream that discards output once the underlying stream fails.

    A closed pipe, a closed terminal or a full disk do not end a run. From then on the file
    descriptor is /dev/null, so that buffered text does not fail either when the process ends.
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
