"""Metrics of the applied steps of a run, from its journal and ``metrics.jsonl``."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from msgspec.structs import replace

from offbeat.runs.applied_steps import AppliedSteps
from offbeat.runs.limits import LINE_BYTES, regular_bytes
from offbeat.runs.metrics_file import ValidRecords, decoded, whole_lines, with_evaluation
from offbeat.runs.page_files import METRICS
from offbeat.runs.run_journal import RunJournal
from offbeat.telemetry.records import MetricRecord, decode_line


class StepRecords:
    """The records of a run in the order of its steps, each step of the standing lineage once.

    A step that a rewind undid is left out; an evaluation is in the record of the step that the
    trainer had reached when it ended, and that of the initial weights a record before all steps, of
    version 0. Reward and staleness, which the journal knows as well,
    are there for a step too whose record a killed controller took along. Records are read anew at
    each iteration.
    """

    def __init__(self, run_dir: Path) -> None:
        """Read the journal, and where each record stands.

        Raises:
            NotARun, JournalCorrupt, JournalVersion: As ``RunJournal``.
            NoRegularFile: ``metrics.jsonl`` is no file.
        """
        self._path = run_dir / METRICS
        journal = RunJournal(run_dir)
        self.run_id = journal.ledger.run_id
        self.unreadable_lines = 0
        steps = AppliedSteps(journal.aggregates)
        self._versions = steps.field("version").astype(int).tolist()
        self._unix_s = steps.field("unix_s").tolist()
        self._own = {name: each for name, each in steps.columns().items() if "/" in name}
        self._standing = ValidRecords()  # records by their offset in the file
        names = dict.fromkeys(name for name, each in self._own.items() if np.isfinite(each).any())
        if self._path.exists():
            regular_bytes(self._path)
            for offset, line in whole_lines(self._path):
                record = decoded(line)
                if record is None:
                    self.unreadable_lines += 1
                else:
                    self._standing.take(record, offset)
                    names |= dict.fromkeys(record.metrics)
        self.names = tuple(sorted(names))
        """Every metric that a step has."""

    def __len__(self) -> int:
        return len(self._versions)

    def __iter__(self) -> Iterator[MetricRecord]:
        if not self._path.exists():
            yield from map(self._from_journal, range(len(self)))
            return
        with self._path.open("rb") as file:
            initial = self._read(file, self._standing.evaluations.get(0))
            if initial is not None:
                yield initial
            for number, version in enumerate(self._versions):
                step = self._read(file, self._standing.steps.get(version))
                evaluation = self._read(file, self._standing.evaluations.get(version))
                record = self._from_journal(number) if step is None else step
                known = {**self._known(number), **record.metrics}
                yield with_evaluation(replace(record, metrics=known), evaluation)

    def _read(self, file: BinaryIO, offset: int | None) -> MetricRecord | None:
        if offset is None:
            return None
        file.seek(offset)
        return decode_line(file.readline(LINE_BYTES))

    def _from_journal(self, number: int) -> MetricRecord:
        version = self._versions[number]
        return MetricRecord(version, version, self._unix_s[number], self._known(number))

    def _known(self, number: int) -> dict[str, float]:
        """Return the metrics that the journal itself knows of a step."""
        values = ((name, float(column[number])) for name, column in self._own.items())
        return {name: value for name, value in values if math.isfinite(value)}
