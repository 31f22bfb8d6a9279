# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportMissingTypeStubs=false
# pyarrow comes without types.
"""Metrics as a table: CSV and Parquet, one row per step and one column per metric."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from offbeat.run_files.disk import replacing
from offbeat.runs.export.step_records import StepRecords

_HEAD: Final = ("step", "version", "time_s")
_BATCH_ROWS: Final = 10_000
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a field that spreadsheets evaluate."""


def write_csv(records: StepRecords, path: Path) -> None:
    """Write the table as UTF-8 text. An empty field: the step has no such metric."""
    with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*_HEAD, *map(_no_formula, records.names)])
        for record in records:
            values = (record.metrics.get(name) for name in records.names)
            rows.writerow([record.step, record.version, record.time_s, *map(_text, values)])


def _no_formula(name: str) -> str:
    """Return a column's name as text that no spreadsheet evaluates; a run may be a stranger's."""
    return f"'{name}" if name.startswith(_FORMULA) else name


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)


def write_parquet(records: StepRecords, path: Path) -> None:
    """Write the table. Null: the step has no such metric."""
    schema = pa.schema(
        [
            pa.field("step", pa.int64()),
            pa.field("version", pa.int64()),
            pa.field("time_s", pa.float64()),
            *(pa.field(name, pa.float64()) for name in records.names),
        ],
        metadata={"offbeat.run_id": records.run_id},
    )
    with replacing(path) as beside, pq.ParquetWriter(beside, schema) as writer:
        for rows in _batches(records):
            writer.write_table(pa.Table.from_pylist(rows, schema))


def _batches(records: StepRecords) -> Iterator[list[dict[str, float]]]:
    rows = list[dict[str, float]]()
    for record in records:
        head = {"step": record.step, "version": record.version, "time_s": record.time_s}
        rows.append({**record.metrics, **head})
        if len(rows) == _BATCH_ROWS:
            yield rows
            rows = []
    yield rows
