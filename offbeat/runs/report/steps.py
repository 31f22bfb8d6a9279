"""Applied steps of a run as columns: from the journal, joined with ``metrics.jsonl``.

The journal has every step of the lineage that stands, also the one whose metrics a killed
controller took along; it decides which steps there are.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.controller.events import Event, Rewound, StepApplied
from offbeat.runs.report.limits import (
    LINE_BYTES,
    METRIC_NAMES,
    METRICS_BYTES,
    SAMPLED_LINES,
    NoRegularFile,
    regular_bytes,
)
from offbeat.telemetry.records import MetricRecord, decode_line

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]
"""A column for each metric: one number per step, NaN where the step has none."""
_HEAT_ROWS: Final = 17  # staleness 0 to 15, and one row for all beyond


class AppliedStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One applied step of the lineage that stands."""

    version: int
    at_s: float  # since the first event of the journal
    reward: float
    samples: int
    tokens: int
    staleness: tuple[tuple[int, int], ...]  # (versions behind, samples)


class StepFold:
    """Collects the applied steps; a rewind removes those that it undoes."""

    def __init__(self) -> None:
        self.steps = list[AppliedStep]()

    def take(self, event: Event, at_s: float) -> None:
        """Add the next event."""
        if isinstance(event, StepApplied):
            self.steps.append(
                AppliedStep(
                    event.version,
                    at_s,
                    event.reward if event.samples else float("nan"),
                    event.samples,
                    event.tokens,
                    event.staleness,
                )
            )
        elif isinstance(event, Rewound):
            while self.steps and self.steps[-1].version > event.to_version:
                self.steps.pop()

    def columns(self) -> dict[str, Floats]:
        """Return what the journal itself knows of each step."""
        steps = self.steps
        samples = np.array([step.samples for step in steps], dtype=np.float64)
        behind = [[age for age, count in step.staleness if count] for step in steps]
        weighted = [sum(age * count for age, count in step.staleness) for step in steps]
        nan = float("nan")
        return {
            "step": np.array([step.version for step in steps], dtype=np.float64),
            "time": np.array([step.at_s for step in steps], dtype=np.float64),
            "samples": np.cumsum(samples),
            "train/reward": np.array([step.reward for step in steps], dtype=np.float64),
            "off_policy/staleness_mean": np.array(weighted, dtype=np.float64)
            / np.where(samples > 0, samples, nan),
            "off_policy/staleness_max": np.array(
                [max(ages, default=nan) for ages in behind], dtype=np.float64
            ),
        }

    def staleness_shares(self, intervals: int) -> list[Floats]:
        """Return the heat map: for each staleness the share of the samples, per interval of steps."""
        count = min(intervals, len(self.steps))
        if not count:
            return []
        oldest = max((age for step in self.steps for age, _ in step.staleness), default=0)
        rows = np.zeros((min(oldest + 1, _HEAT_ROWS), count))
        for position, step in enumerate(self.steps):
            for age, samples in step.staleness:
                rows[min(max(age, 0), len(rows) - 1), position * count // len(self.steps)] += (
                    samples
                )
        totals = rows.sum(axis=0)
        return list(rows / np.where(totals > 0, totals, 1.0))


class MetricsFile(msgspec.Struct):
    """Records of ``metrics.jsonl`` by version, as far as they could be read."""

    by_version: dict[int, MetricRecord] = {}
    unreadable: int = 0  # lines
    problem: str = ""  # why none was read
    sampled: bool = False  # only some lines were read, because there are too many


def read_metrics_file(path: Path) -> MetricsFile:
    """Read a ``metrics.jsonl``; of two records of a version the later one holds."""
    found = MetricsFile()
    try:
        nbytes = regular_bytes(path)
    except FileNotFoundError:
        return found  # the run has trained no step yet
    except (NoRegularFile, OSError) as error:
        found.problem = str(error)
        return found
    found.sampled = nbytes > METRICS_BYTES
    for line in _sampled_lines(path, nbytes) if found.sampled else _lines(path):
        try:
            record = decode_line(line)
        except (msgspec.DecodeError, ValueError, KeyError, OverflowError):
            found.unreadable += 1
            continue
        found.by_version[record.version] = record
    return found


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES):
            if line.endswith(b"\n"):  # else torn: the run is writing it
                yield line


def _sampled_lines(path: Path, nbytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for offset in np.linspace(0, nbytes - 1, SAMPLED_LINES, dtype=np.int64).tolist():
            file.seek(offset)
            if offset:
                file.readline(LINE_BYTES)  # the rest of the line that the offset is in
            line = file.readline(LINE_BYTES)
            if line.endswith(b"\n"):
                yield line


def joined(own: Columns, found: MetricsFile) -> dict[str, Floats]:
    """Return the journal's columns and those of the metrics, at the same steps.

    A metric that the journal knows as well is taken from the journal.
    """
    columns = dict(own)
    rows = {int(version): row for row, version in enumerate(own["step"])}
    for version, record in found.by_version.items():
        row = rows.get(version)
        if row is None:
            continue  # undone by a rewind
        for name, value in record.metrics.items():
            if name in own:
                continue
            column = columns.get(name)
            if column is None:
                if len(columns) >= METRIC_NAMES:
                    continue
                column = columns[name] = np.full(len(rows), np.nan)
            column[row] = value
    return columns


def binned(column: Floats, bins: int) -> Floats:
    """Return the mean of the finite numbers in each of at most ``bins`` equal runs of steps."""
    if len(column) <= bins:
        return column
    starts = np.arange(bins) * len(column) // bins
    finite = np.isfinite(column)
    sums = np.add.reduceat(np.where(finite, column, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    return np.where(counts > 0, sums / np.where(counts > 0, counts, 1.0), np.nan)


def last_of_bins(column: Floats, bins: int) -> Floats:
    """Return the last number of each run of ``binned``: where its steps end."""
    if len(column) <= bins:
        return column
    ends = (np.arange(bins) + 1) * len(column) // bins - 1
    return column[ends]
