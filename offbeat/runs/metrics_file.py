"""Reads ``metrics.jsonl`` into the records of steps and of evaluations, by version.

An evaluation has a separate record, under the scored version. The trainer continues during the
evaluation, so this record often follows the records of later steps.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np

from offbeat.run_files.limits import (
    LINE_BYTES,
    METRICS_BYTES,
    SAMPLED_LINES,
    SCANNED_BYTES,
    NoRegularFile,
    regular_bytes,
)
from offbeat.telemetry.records import EVALUATION_MARK, MetricRecord, decode_line, is_evaluation

_BLOCK_BYTES: Final = 2**22


class MetricsFile(msgspec.Struct):
    """Readable records of ``metrics.jsonl``, by version."""

    steps: dict[int, MetricRecord] = {}
    evaluations: dict[int, MetricRecord] = {}
    unreadable: int = 0  # lines
    problem: str = ""  # why none was read
    sampled: bool = False  # whether only some steps were read, because there are too many


class ValidRecords:
    """Index of the records that no rewind has undone.

    A later record replaces an earlier one of the same kind and version. If a step is trained again,
    a rewind has undone the evaluations of its version and of later versions, so they are removed.
    """

    def __init__(self) -> None:
        self.steps = dict[int, int]()
        """Position of the step's record, by version."""
        self.evaluations = dict[int, int]()
        """Position of the evaluation's record, by version."""
        self._newest = -1  # version of a step

    def take(self, record: MetricRecord, place: int) -> None:
        """Add the next record. ``place`` is any number by which the caller can find it."""
        version = record.version
        if is_evaluation(record):
            scored = int(record.metrics.get("eval/version", version))  # of old runs a later version
            self.evaluations[scored] = place
            return
        if version <= self._newest:
            undone = [each for each in self.evaluations if each >= version]
            for each in undone:
                del self.evaluations[each]
        self._newest = version
        self.steps[version] = place


def with_evaluation(step: MetricRecord, evaluation: MetricRecord | None) -> MetricRecord:
    """Return the record of a step with the metrics of its version's evaluation, if any."""
    if evaluation is None:
        return step
    return msgspec.structs.replace(step, metrics={**step.metrics, **evaluation.metrics})


def read_metrics_file(path: Path) -> MetricsFile:
    """Read a ``metrics.jsonl``. From a long file, read only some steps, and the evaluations."""
    found = MetricsFile()
    try:
        nbytes = regular_bytes(path)
    except FileNotFoundError:
        return found  # the run has trained no step yet
    except (NoRegularFile, OSError) as error:
        found.problem = str(error)
        return found
    found.sampled = nbytes > METRICS_BYTES
    records, valid = list[MetricRecord](), ValidRecords()
    for _, line in _sample_lines(path, nbytes) if found.sampled else whole_lines(path):
        record = decode_record(line)
        if record is None:
            found.unreadable += 1
        else:
            valid.take(record, len(records))
            records.append(record)
    found.steps = {version: records[place] for version, place in valid.steps.items()}
    found.evaluations = {version: records[place] for version, place in valid.evaluations.items()}
    return found


def decode_record(line: bytes) -> MetricRecord | None:
    """Return the record in a line, or None if it holds none."""
    try:
        return decode_line(line)
    except (msgspec.DecodeError, ValueError, KeyError, OverflowError):
        return None


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its offset, except an incomplete line that is still being written."""
    offset = 0
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES):
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def _sample_lines(path: Path, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield lines at equal distances, and as many lines with evaluations, in the file's order.

    A run may have one evaluation per some hundred steps, so lines at equal distances would miss
    almost all evaluations.
    """
    with path.open("rb") as file:
        begins = _evenly(list(_evaluations(file, min(nbytes, SCANNED_BYTES))))
        for offset in np.linspace(0, nbytes - 1, SAMPLED_LINES, dtype=np.int64).tolist():
            file.seek(offset)
            if offset:
                file.readline(LINE_BYTES)  # the rest of the line at the offset
            begins.add(file.tell())
        for begin in sorted(begins):
            file.seek(begin)
            line = file.readline(LINE_BYTES)
            if line.endswith(b"\n"):
                yield begin, line


def _evenly(offsets: list[int]) -> set[int]:
    """Return at most ``SAMPLED_LINES`` of the offsets, including the first and the last."""
    if len(offsets) <= SAMPLED_LINES:
        return set(offsets)
    chosen = np.linspace(0, len(offsets) - 1, SAMPLED_LINES, dtype=np.int64).tolist()
    return {offsets[each] for each in chosen}


def _evaluations(file: BinaryIO, nbytes: int) -> Iterator[int]:
    """Yield the start offsets of lines that name an evaluation's metric, without parsing them."""
    base, block = 0, b""  # the text after the last newline, and its offset
    while base + len(block) < nbytes:
        more = file.read(_BLOCK_BYTES)
        if not more:
            return
        block += more
        ended, at = block.rfind(b"\n") + 1, 0
        while (at := block.find(EVALUATION_MARK, at, ended)) >= 0:
            yield base + block.rfind(b"\n", 0, at) + 1
            at = block.index(b"\n", at)
        if not ended and len(block) > LINE_BYTES:
            ended = len(block)  # no line of a run is that long
        base, block = base + ended, block[ended:]
