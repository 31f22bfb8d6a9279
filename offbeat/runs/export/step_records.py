"""Metrics of the applied steps of a run, from its journal and ``metrics.jsonl``."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from offbeat.controller.events import Opened
from offbeat.runs.past_run import read_events
from offbeat.runs.report.limits import LINE_BYTES, regular_bytes
from offbeat.runs.report.steps import AppliedStep, StepFold
from offbeat.telemetry.records import MetricRecord, decode_line

_METRICS: Final = "metrics.jsonl"


class StepRecords:
    """The records of a run in the order of its steps, each step of the standing lineage once.

    A step that a rewind undid is left out. Reward and staleness, which the journal knows as well,
    are there for a step too whose record a killed controller took along. Records are read anew at
    each iteration.
    """

    def __init__(self, run_dir: Path) -> None:
        """Read the journal, and where each record stands.

        Raises:
            NotARun, JournalCorrupt, JournalVersion: As ``read_events``.
            NoRegularFile: ``metrics.jsonl`` is no file.
        """
        self._path = run_dir / _METRICS
        self.run_id = ""
        self.unreadable_lines = 0
        self._began_unix_s: float | None = None
        self._steps = self._fold(run_dir)
        self._own = _own_metrics(self._steps)
        self._offset_by_version = dict[int, int]()
        names = dict.fromkeys(name for metrics in self._own for name in metrics)
        if self._path.exists():
            regular_bytes(self._path)
            for offset, record in self._records():
                self._offset_by_version[record.version] = offset
                names |= dict.fromkeys(record.metrics)
        self.names = tuple(sorted(names))
        """Every metric that a step has."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[MetricRecord]:
        if not self._offset_by_version:
            yield from (self._from_journal(number) for number in range(len(self._steps)))
            return
        with self._path.open("rb") as file:
            for number, step in enumerate(self._steps):
                offset = self._offset_by_version.get(step.version)
                if offset is None:
                    yield self._from_journal(number)
                else:
                    file.seek(offset)
                    record = decode_line(file.readline(LINE_BYTES))
                    yield replace(record, metrics={**self._own[number], **record.metrics})

    def _fold(self, run_dir: Path) -> list[AppliedStep]:
        fold = StepFold()
        for event in read_events(run_dir):
            if self._began_unix_s is None:
                self._began_unix_s = event.unix_s
            if isinstance(event, Opened):
                self.run_id = event.run_id
            fold.take(event, event.unix_s - self._began_unix_s)
        return fold.steps

    def _records(self) -> Iterator[tuple[int, MetricRecord]]:
        offset = 0
        with self._path.open("rb") as file:
            while line := file.readline(LINE_BYTES):
                try:
                    if line.endswith(b"\n"):  # else torn: the run is writing it
                        yield offset, decode_line(line)
                except (msgspec.DecodeError, ValueError, KeyError, OverflowError):
                    self.unreadable_lines += 1
                offset += len(line)

    def _from_journal(self, number: int) -> MetricRecord:
        step = self._steps[number]
        unix_s = (self._began_unix_s or 0.0) + step.at_s
        return MetricRecord(step.version, step.version, unix_s, self._own[number])


def _own_metrics(steps: list[AppliedStep]) -> list[dict[str, float]]:
    """Return the metrics that the journal itself knows of each step."""
    fold = StepFold()
    fold.steps = steps
    columns = {name: column.tolist() for name, column in fold.columns().items() if "/" in name}
    return [
        {name: column[row] for name, column in columns.items() if math.isfinite(column[row])}
        for row in range(len(steps))
    ]
