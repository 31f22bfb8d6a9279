"""The last metrics of each run as Prometheus text."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from offbeat.runs.limits import LINE_BYTES, NoRegularFile, regular_bytes
from offbeat.runs.metrics_file import decoded, with_evaluation
from offbeat.runs.page_files import METRICS
from offbeat.telemetry.records import EVALUATION_MARK, MetricRecord

_NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")


def last_record(run_dir: Path) -> MetricRecord | None:
    """Return the last whole record of a step, with the metrics of the newest evaluation.

    Each of the two is looked for in the last ``LINE_BYTES`` of the metrics, some hundred steps;
    None before the first. So the scores of an evaluation stay until the next one.
    """
    try:
        regular_bytes(run_dir / METRICS)
        with (run_dir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LINE_BYTES))
            lines = file.read(LINE_BYTES).split(b"\n")
    except (OSError, NoRegularFile):
        return None
    whole = lines[-2::-1]  # newest first; after the last newline stands a torn record
    step = next((line for line in whole if EVALUATION_MARK not in line), b"")
    scores = next((line for line in whole if EVALUATION_MARK in line), b"")
    records = [record for line in (step, scores) if (record := decoded(line)) is not None]
    return with_evaluation(records[0], records[-1]) if records else None


def exposition(records: Iterable[tuple[str, MetricRecord]]) -> str:
    """Return the gauges of all runs in the text format 0.0.4.

    A family's name has fewer characters than a metric's, so that several metrics may share one
    (``rewards/a-b`` and ``rewards/a_b``): the label ``metric`` has the whole name.
    """
    families = defaultdict[str, list[tuple[str, str, float]]](list)
    for run, record in records:
        values: Mapping[str, float] = {
            "version": record.version, "record_time_seconds": record.time_s, **record.metrics
        }  # fmt: skip
        for name, value in values.items():
            families[f"offbeat_{_NOT_IN_A_NAME.sub('_', name)}"].append((run, name, value))
    lines = list[str]()
    for family in sorted(families):
        lines.append(f"# TYPE {family} gauge")
        lines += [
            f'{family}{{run="{_escaped(run)}",metric="{_escaped(name)}"}} {_number(value)}'
            for run, name, value in families[family]
        ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
