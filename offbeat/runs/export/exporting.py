"""``offbeat export``: one run into one tool."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyarrow comes without types.

import csv
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from offbeat.messages.failures import OffbeatError
from offbeat.plugins.tensorboard.sink import TensorBoardSink
from offbeat.plugins.wandb.section import WandbConfig
from offbeat.plugins.wandb.sink import WandbSink
from offbeat.run_files.disk import replacing
from offbeat.runs.directory import CONFIG
from offbeat.runs.export.mlflow_sink import MlflowSink
from offbeat.runs.export.step_records import StepRecords
from offbeat.runs.report.recipe_values import readable_values
from offbeat.telemetry.sinks import Sink

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
    columns = [("step", pa.int64()), ("version", pa.int64()), ("time_s", pa.float64())]
    columns += [(name, pa.float64()) for name in records.names]
    schema = pa.schema(columns, metadata={"offbeat.run_id": records.run_id})
    rows = (
        {**each.metrics, "step": each.step, "version": each.version, "time_s": each.time_s}
        for each in records
    )
    with replacing(path) as beside, pq.ParquetWriter(beside, schema) as writer:
        while batch := list(islice(rows, _BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema))


Tool = Literal["csv", "parquet", "tensorboard", "mlflow", "wandb"]
TOOLS: Final[tuple[str, ...]] = get_args(Tool)


class NotExported(OffbeatError):
    """A run that cannot be exported as it was asked for."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}"


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export: where it went, and how much."""

    steps: int
    metrics: int
    where: str
    look: str  # the command that shows it; empty for a table
    unreadable_lines: int


def export(run_dir: Path, tool: Tool, output: str | None, *, in_samples: bool = False) -> Exported:
    """Write the metrics of ``run_dir`` for ``tool``.

    ``output`` is a file (csv, parquet), a directory (tensorboard, wandb) or a tracking URI
    (mlflow); None: a place inside the run directory. ``in_samples``: TensorBoard's x axis counts
    samples.

    Raises:
        NotARun, JournalCorrupt, JournalVersion: As ``read_events``.
        NotExported: The place is taken or cannot be one, or the x axis is not known.
        SinkUnusable: The tool is not installed, or does not answer.
        OSError: The place cannot be written.
    """
    records = StepRecords(run_dir)
    recipe = readable_values(run_dir / CONFIG)  # names and parameters; metrics do not need it
    name = str(recipe.get("name", run_dir.resolve().name))
    where, look = output or "", ""
    match tool:
        case "csv":
            where = output or str(run_dir / "metrics.csv")
            write_csv(records, _table(where, tool))
        case "parquet":
            where = output or str(run_dir / "metrics.parquet")
            write_parquet(records, _table(where, tool))
        case "tensorboard":
            folder = Path(output) / run_dir.resolve().name if output else run_dir / "tensorboard"
            per_version = _samples_per_step(recipe) if in_samples else 1
            where, look = str(folder), f"tensorboard --logdir {output or run_dir}"
            if folder.is_dir() and any(folder.glob("events.out.tfevents.*")):
                raise NotExported(
                    f"{folder} has files of events already",
                    "Name another directory with --output, or remove them",
                )
            _write(records, TensorBoardSink(folder, per_version=per_version))
        case "mlflow":
            where = output or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
            look = f"mlflow ui --backend-store-uri {where}"
            sink = MlflowSink(where, run_id=records.run_id, run_name=name, recipe=recipe)
            _write(records, sink)
        case "wandb":
            where = output or str(run_dir)
            look = f"wandb sync {where}/wandb/offline-run-*"
            sink = WandbSink(
                WandbConfig(project=str(recipe.get("wandb.project", "offbeat"))),
                mode="offline",
                run_id=records.run_id,
                run_name=name,
                run_dir=Path(where),
                recipe=recipe,
            )
            _write(records, sink)
    return Exported(len(records), len(records.names), where, look, records.unreadable_lines)


def _table(where: str, tool: Tool) -> Path:
    """Return the path of a table, whose ending keeps ``--output`` from replacing another file."""
    path = Path(where)
    if path.suffix != f".{tool}" or (path.exists() and not path.is_file()):
        raise NotExported(
            f"--output {where} is no name for a {tool} file",
            f"Name a file that ends in .{tool}: one that is there is replaced",
        )
    if not path.parent.is_dir():
        raise NotExported(f"--output {where}: {path.parent} is no directory", "Make it first")
    return path


def _write(records: StepRecords, sink: Sink) -> None:
    try:
        sink.open()
        for record in records:
            sink.write(record)
    finally:
        sink.close()


def _samples_per_step(recipe: dict[str, object]) -> int:
    groups, samples = recipe.get("groups_per_step"), recipe.get("samples_per_group")
    if not isinstance(groups, int) or not isinstance(samples, int):
        raise NotExported(
            f"{CONFIG} does not say how many samples a step has", "Use the axis of steps"
        )
    return groups * samples
