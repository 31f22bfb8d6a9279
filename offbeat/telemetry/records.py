"""One step's metrics as a record, and its encoding as a line of ``metrics.jsonl``."""

import math
from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat.messages.bad_json import decode_json
from offbeat.telemetry.step_samples import StepSamples


class MetricRecord(msgspec.Struct, frozen=True):
    """Record that every sink receives. All sinks share ``metrics``, so none may change it."""

    step: int  # optimizer step, from 1; for an evaluation, the scored version
    version: int  # trainer version after the step; for an evaluation, the scored version
    time_s: float  # Unix time of the end of the step or evaluation
    metrics: dict[str, float]
    samples: StepSamples | None = None  # of a step, if a sink wants them; not part of the line


EVALUATION: Final = "eval/"
"""Prefix of the name of every evaluation metric."""
EVALUATION_MARK: Final = f'"{EVALUATION}'.encode()
"""Bytes that only lines of evaluations contain."""


def is_evaluation(record: MetricRecord) -> bool:
    """Return whether a record belongs to an evaluation, which may end steps after its version."""
    return bool(record.metrics) and all(name.startswith(EVALUATION) for name in record.metrics)


def encode_line(record: MetricRecord) -> bytes:
    """Encode the record as one line of valid JSON, newline included.

    JSON has no literal for values that are not finite. They are written as strings that ``float``
    parses.
    """
    head: dict[str, Any] = {
        "step": record.step, "version": record.version, "time_s": round(record.time_s, 3)
    }  # fmt: skip
    values = {name: _portable(value) for name, value in record.metrics.items()}
    # The head is first in the line, and again last so that no metric replaces it.
    return msgspec.json.encode({**head, **values, **head}) + b"\n"


def decode_line(line: bytes) -> MetricRecord:
    """Decode a line that ``encode_line`` wrote.

    Raises:
        msgspec.DecodeError: The line is not a record.
    """
    values = decode_json(line, dict[str, float | str])
    head = {name: float(values.pop(name)) for name in ("step", "version", "time_s")}
    metrics = {name: float(value) for name, value in values.items()}
    return MetricRecord(int(head["step"]), int(head["version"]), head["time_s"], metrics)


def read_metrics(path: Path) -> list[MetricRecord]:
    """Read every complete record of a ``metrics.jsonl``, even of a live or crashed run."""
    lines = path.read_bytes().split(b"\n")
    return [decode_line(line) for line in lines[:-1]]  # the last item is a torn record


def _portable(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
