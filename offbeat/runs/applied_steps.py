"""Applied steps of a run as columns: from the journal, joined with ``metrics.jsonl``.

The journal has every step of the current lineage, even if a step's metrics were lost when the
controller was killed. So the journal decides which steps exist.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.controller.stats_records import STEP_FIELDS, Aggregates
from offbeat.run_files.limits import METRIC_NAMES
from offbeat.runs.metrics_file import MetricsFile
from offbeat.telemetry.records import MetricRecord

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]
"""One column per metric: one number per step, NaN if the step has none."""
Counts = NDArray[np.int32]
AXES: Final = ("step", "time", "samples")
"""Columns that a chart can use as its x axis."""
PAUSE: Final = STEP_FIELDS.index("pause_s")
_HEAT_ROWS: Final = 17  # staleness 0 to 15, and one row for everything above
_POINTS: Final = 5000
"""Longer runs are read as this many equal intervals of steps, so that memory hardly grows."""
_STEPS: Final = 50_000  # up to here every step is read individually


def read_steps(part: Aggregates) -> Floats:
    """Return the steps in a part of the journal: a row per step, a column per ``STEP_FIELDS``."""
    return np.frombuffer(part.steps, "<f8").reshape(-1, len(STEP_FIELDS))


class AppliedSteps:
    """The applied steps of the current lineage, from the parts of a journal."""

    def __init__(self, parts: Sequence[Aggregates]) -> None:
        self._began_unix_s = parts[0].began_unix_s if parts else 0.0
        pieces, ages = [_EMPTY], [_NO_AGES]
        for part in parts:
            if part.undone_to is not None:
                _drop_after(part.undone_to, pieces, ages)
            rows = read_steps(part)
            samples, extremes = _staleness(part, len(rows))
            pieces.append(np.hstack((rows, extremes)))
            ages.append(samples)
        self._rows: Floats = np.concatenate(pieces)
        self._samples_by_age: Counts = np.concatenate(ages)

    def __len__(self) -> int:
        return len(self._rows)

    def field(self, name: str) -> Floats:
        """Return a column by its name in ``STEP_FIELDS``."""
        return self._rows[:, STEP_FIELDS.index(name)]

    def columns(self) -> dict[str, Floats]:
        """Return the values that the journal itself has for each step."""
        samples, weighted, oldest = self.field("samples"), self._rows[:, -2], self._rows[:, -1]
        return {
            "step": self.field("version"),
            "time": np.maximum(0.0, self.field("unix_s") - self._began_unix_s),
            "samples": np.cumsum(samples),
            "train/reward": self.field("reward"),
            "off_policy/staleness_mean": weighted / np.where(samples > 0, samples, np.nan),
            "off_policy/staleness_max": np.where(oldest >= 0, oldest, np.nan),
        }

    def staleness_shares(self, intervals: int) -> list[Floats]:
        """Return the heat map: for each interval of steps, the share of samples by staleness."""
        count = min(intervals, len(self))
        if not count:
            return []
        starts = np.arange(count) * len(self) // count
        sums = np.add.reduceat(self._samples_by_age, starts, axis=0, dtype=np.int64)
        known = np.flatnonzero(sums.any(axis=0))
        rows = sums[:, : int(known[-1]) + 1 if len(known) else 1].astype(np.float64)
        totals = rows.sum(axis=1, keepdims=True)
        return list((rows / np.where(totals > 0, totals, 1.0)).T)


_EMPTY: Final[Floats] = np.zeros((0, len(STEP_FIELDS) + 2))
_NO_AGES: Final[Counts] = np.zeros((0, _HEAT_ROWS), np.int32)


def _drop_after(version: int, pieces: list[Floats], ages: list[Counts]) -> None:
    """Remove the steps after a version, because a rewind has undone them."""
    while pieces:
        kept = int(np.searchsorted(pieces[-1][:, 0], version, side="right"))
        if kept:
            pieces[-1], ages[-1] = pieces[-1][:kept], ages[-1][:kept]
            return
        pieces.pop()
        ages.pop()


def _staleness(part: Aggregates, steps: int) -> tuple[Counts, Floats]:
    """Return the samples of each step by staleness, and its sum and maximum of staleness.

    The last column also counts all higher staleness. Without samples, the maximum is -1.
    """
    by_age = np.zeros((steps, _HEAT_ROWS), dtype=np.int32)
    extremes = np.zeros((steps, 2))
    extremes[:, 1] = -1
    rows, behind, samples = np.frombuffer(part.staleness, "<i8").reshape(-1, 3).T
    known = (rows >= 0) & (rows < steps) & (samples > 0)
    rows, behind, samples = rows[known], behind[known], samples[known]
    np.add.at(by_age, (rows, np.clip(behind, 0, _HEAT_ROWS - 1)), samples)
    np.add.at(extremes[:, 0], rows, behind * samples)
    np.maximum.at(extremes[:, 1], rows, behind)
    return by_age, extremes


def join_columns(own: Columns, found: MetricsFile) -> dict[str, Floats]:
    """Return the columns of the journal and of the metrics, at the same steps.

    If both have a metric, the journal's is used. If there are more than ``_STEPS`` steps, a row is
    the mean of several steps, with the number, time and samples of the last of them.
    """
    columns = dict(own)
    if len(own["step"]) > _STEPS:
        columns = {
            name: (last_of_bins if name in AXES else bin_means)(column, _POINTS)
            for name, column in own.items()
        }
    ends = columns["step"]
    for version, record in found.steps.items():
        row = int(np.searchsorted(ends, version))
        if row == len(ends) or (len(ends) == len(own["step"]) and ends[row] != version):
            continue  # a rewind has undone it
        _fill(columns, row, record, known=own)
    return columns


def read_evaluations(own: Columns, found: MetricsFile) -> dict[str, Floats]:
    """Return a row for each valid evaluation, at the step, time and samples of its version.

    The initial weights are version 0, which no step produced.
    """
    axes = {name: np.concatenate(([0.0], own[name])) for name in AXES}
    versions = np.array(sorted(found.evaluations), dtype=np.int64)
    standing = versions[np.isin(versions, axes["step"])]
    rows = np.searchsorted(axes["step"], standing)
    columns = {name: axis[rows] for name, axis in axes.items()}
    for row, version in enumerate(standing.tolist()):
        _fill(columns, row, found.evaluations[version], known=axes)
    return columns


def _fill(columns: dict[str, Floats], row: int, record: MetricRecord, *, known: Columns) -> None:
    """Write the metrics of a record into its row, except those that are ``known`` already."""
    for name, value in record.metrics.items():
        if name in known:
            continue
        column = columns.get(name)
        if column is None:
            if len(columns) >= METRIC_NAMES:
                continue
            column = columns[name] = np.full(len(columns["step"]), np.nan)
        column[row] = value


def bin_means(column: Floats, bins: int) -> Floats:
    """Return the mean of the finite numbers in each of at most ``bins`` intervals of steps."""
    if len(column) <= bins:
        return column
    starts = np.arange(bins) * len(column) // bins
    finite = np.isfinite(column)
    sums = np.add.reduceat(np.where(finite, column, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    return np.where(counts > 0, sums / np.where(counts > 0, counts, 1.0), np.nan)


def last_of_bins(column: Floats, bins: int) -> Floats:
    """Return the last number in each interval of ``bin_means``."""
    if len(column) <= bins:
        return column
    ends = (np.arange(bins) + 1) * len(column) // bins - 1
    return column[ends]
