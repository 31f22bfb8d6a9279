"""JSON array of trace events on disk that grows by one line per event."""

from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from offbeat.telemetry.trace_events import metadata

log = structlog.stdlib.get_logger()
_BEGIN: Final = "offbeat.begin"
_MARK: Final = f'"name":"{_BEGIN}"'.encode()


class TraceJson:
    """Appends events; the partial line of a write that raised is cut off by the next one.

    The file is ``[``, then one event per line, each but the first after a comma, then ``]``. So it
    can be read at any moment, and continued after a crash.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = 0  # number of events in the file
        self._file: FileIO | None = None
        self._end = 0  # offset of the end of the last whole event

    def open(self, unix_s: float) -> tuple[int, float]:
        """Create the file, or continue after its last whole event.

        A file of other content is moved aside, to ``trace.json.unreadable``.

        Returns:
            The number of controllers that have written before, and the Unix time of the trace's 0.

        Raises:
            OSError: The file cannot be opened.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        try:
            incarnation, began_unix_s = self._scan()
        except (msgspec.DecodeError, KeyError, TypeError):
            if self.path.stat().st_size:
                aside = self.path.with_name(f"{self.path.name}.unreadable")
                self.path.rename(aside)
                log.warning("trace.set_aside", path=str(aside))
            self._end = self.events = 0
            incarnation, began_unix_s = 0, unix_s
        self._file = FileIO(self.path, "a")
        facts = {"incarnation": incarnation, "unix_s": unix_s, "began_unix_s": began_unix_s}
        self.append([msgspec.json.encode(metadata(_BEGIN, facts))])
        return incarnation, began_unix_s

    def append(self, events: Sequence[bytes]) -> None:
        """Write encoded events: all of them or, as far as a later call can detect, none.

        Raises:
            OSError: The write failed.
        """
        if events:
            self._write((b"," if self._end else b"[\n") + b"\n,".join(events) + b"\n")
            self.events += len(events)

    def close(self) -> None:
        """End the array.

        Raises:
            OSError: The write failed.
        """
        if self._file is not None:
            self._write(b"]\n")
            self._file.close()
            self._file = None

    def _write(self, content: bytes) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open")
        self._file.truncate(self._end)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self._end += len(content)

    def _scan(self) -> tuple[int, float]:
        """Return the result of ``open``; record where the last whole event ends."""
        incarnations, self.events, first = 0, 0, b""
        with self.path.open("rb") as file:
            self._end = len(file.readline())  # the line of [
            for line in file:
                if not line.endswith(b"}\n"):
                    break  # the end of the array, or a torn event
                first = first or line
                incarnations += _MARK in line
                self.events += 1
                self._end += len(line)
        begin: dict[str, Any] = msgspec.json.decode(first, type=dict[str, Any])
        return incarnations, float(begin["args"]["began_unix_s"])
