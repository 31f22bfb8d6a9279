"""Writes ``metrics.jsonl``, the complete record of a run: one line per step."""

import os
from io import FileIO
from pathlib import Path

from offbeat.telemetry.records import MetricRecord, encode_line


class JsonlSink:
    """Appends each record as one whole line.

    Before and after every call the file is a sequence of whole lines, or ends in one torn line that
    the next ``open`` or ``write`` cuts off: a record is never partial and never duplicated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._end = 0  # offset of the end of the last whole line

    @property
    def name(self) -> str:
        return self._path.name

    def open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        self._end = _end_of_last_line(file)
        self._file = file

    def write(self, record: MetricRecord) -> None:
        if self._file is None:
            raise ValueError(f"{self._path} is not open")
        line = memoryview(encode_line(record))
        self._file.truncate(self._end)  # remove the torn line of a write that raised
        self._file.seek(self._end)
        written = 0
        while written < len(line):
            written += self._file.write(line[written:]) or 0
        self._end += written

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _end_of_last_line(file: FileIO, block: int = 1 << 16) -> int:
    """Return the offset after the last newline; 0 without one."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
