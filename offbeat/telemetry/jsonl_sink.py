"""Writes ``metrics.jsonl``, the complete record of a run: one line per step."""

from pathlib import Path

from offbeat.run_files.line_file import LineFile
from offbeat.telemetry.records import MetricRecord, encode_line


class JsonlSink:
    """Appends each record as one whole line: a record is never partial and never duplicated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LineFile | None = None

    @property
    def name(self) -> str:
        return self._path.name

    def open(self) -> None:
        self._file = LineFile(self._path)

    def write(self, record: MetricRecord) -> None:
        if self._file is None:
            raise ValueError(f"{self._path} is not open")
        self._file.append(encode_line(record))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
