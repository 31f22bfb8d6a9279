"""Implements ``offbeat export``: one run into one tool.

Reads metrics of the applied steps of a run from its journal and ``metrics.jsonl``.

MLflow sink: one run of an experiment on a tracking server, or in a database file.
"""

# pyright: basic, reportMissingImports=false
# The extra mlflow may not be installed.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyarrow has no types.

import csv
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from offbeat.messages.failures import OffbeatError
from offbeat.run_files.disk import replacing
from offbeat.run_files.limits import LINE_BYTES, regular_bytes
from offbeat.runs.applied_steps import AppliedSteps
from offbeat.runs.directory import CONFIG
from offbeat.runs.metrics_file import ValidRecords, decode_record, whole_lines, with_evaluation
from offbeat.runs.page_files import METRICS, check_not_linked, readable_values
from offbeat.runs.run_journal import RunJournal
from offbeat.telemetry.hub import all_trackers
from offbeat.telemetry.records import MetricRecord, decode_line
from offbeat.telemetry.tracker import Sink, SinkUnusable, TrackedRun, not_installed

_PER_REQUEST: Final = 1000
"""Maximum number of metrics per MLflow request."""

_PARAMETERS_PER_REQUEST: Final = 100
_LONGEST_VALUE: Final = 6000  # characters of a parameter's value
_NOT_IN_A_NAME: Final = re.compile(r"[^\w\-. /:]", re.ASCII)
EXPERIMENT: Final = "offbeat"


class MlflowSink:
    """Writes a new MLflow run of the experiment ``offbeat``. A tag has the run's id.

    MLflow allows fewer characters in a name than metrics have. ``eval/pass@4`` becomes
    ``eval/pass_40_4``, with the character's code between underscores, so that all names differ.
    """

    def __init__(self, uri: str, *, run_id: str, run_name: str, recipe: Mapping[str, Any]) -> None:
        """``recipe`` has the run's parameters by dotted key: pass them redacted."""
        self._uri, self._run_id, self._run_name, self._recipe = uri, run_id, run_name, recipe
        self._client: Any = None
        self._mlflow_run_id = ""
        self._pending = list[Any]()

    @property
    def name(self) -> str:
        return "mlflow"

    def open(self) -> None:
        """Begin the run.

        Raises:
            SinkUnusable: mlflow is not installed, or the server does not answer.
        """
        # MLflow would retry for minutes if the server is down. Users who want that can set these.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        try:
            from mlflow.entities import Param  # noqa: PLC0415  an optional extra, seconds
            from mlflow.exceptions import MlflowException  # noqa: PLC0415
            from mlflow.tracking import MlflowClient  # noqa: PLC0415
        except ImportError as error:
            raise not_installed("mlflow", error) from error
        try:
            self._client = MlflowClient(tracking_uri=self._uri)
            experiment = self._client.get_experiment_by_name(EXPERIMENT)
            experiment_id = (
                self._client.create_experiment(EXPERIMENT)
                if experiment is None
                else experiment.experiment_id
            )
            run = self._client.create_run(
                experiment_id, run_name=self._run_name, tags={"offbeat.run_id": self._run_id}
            )
        except MlflowException as error:
            raise SinkUnusable(
                "mlflow", " ".join(str(error).split())[:300],
                "Name a tracking server or a database with --output, as in sqlite:///mlflow.db",
            ) from error  # fmt: skip
        self._mlflow_run_id = run.info.run_id
        parameters = [
            Param(_make_name(key), str(value)[:_LONGEST_VALUE])
            for key, value in self._recipe.items()
        ]
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            batch = parameters[start : start + _PARAMETERS_PER_REQUEST]
            self._client.log_batch(self._mlflow_run_id, params=batch)

    def write(self, record: MetricRecord) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415  open has imported it

        at_ms = int(record.time_s * 1000)
        self._pending += [
            Metric(_make_name(name), value, at_ms, record.version)
            for name, value in record.metrics.items()
        ]
        while len(self._pending) >= _PER_REQUEST:
            self._send()

    def close(self) -> None:
        if self._client is None:
            return
        while self._pending:
            self._send()
        self._client.set_terminated(self._mlflow_run_id)

    def _send(self) -> None:
        self._client.log_batch(self._mlflow_run_id, metrics=self._pending[:_PER_REQUEST])
        del self._pending[:_PER_REQUEST]


def _make_name(name: str) -> str:
    return _NOT_IN_A_NAME.sub(lambda found: f"_{ord(found.group()):x}_", name)


class StepRecords:
    """Records of a run in the order of its steps, each step of the valid lineage once.

    A step that a rewind undid is left out. An evaluation is in the record of the step that the
    trainer had reached when it ended. The evaluation of the initial weights is a record before all
    steps, of version 0. If a killed controller lost a step's record, reward and staleness come from
    the journal. Each iteration reads the records again.
    """

    def __init__(self, run_dir: Path) -> None:
        """Read the journal, and the position of each record.

        Raises:
            NotARun, JournalCorrupt, JournalVersion: As ``RunJournal``.
            NoRegularFile: ``metrics.jsonl`` is not a file.
        """
        self._path = run_dir / METRICS
        journal = RunJournal(run_dir)
        self.run_id = journal.ledger.run_id
        self.unreadable_lines = 0
        steps = AppliedSteps(journal.aggregates)
        self._versions = steps.field("version").astype(int).tolist()
        self._unix_s = steps.field("unix_s").tolist()
        self._own = {name: each for name, each in steps.columns().items() if "/" in name}
        self._standing = ValidRecords()  # valid records by their offset in the file
        names = dict.fromkeys(name for name, each in self._own.items() if np.isfinite(each).any())
        if self._path.exists():
            regular_bytes(self._path)
            for offset, line in whole_lines(self._path):
                record = decode_record(line)
                if record is None:
                    self.unreadable_lines += 1
                else:
                    self._standing.take(record, offset)
                    names |= dict.fromkeys(record.metrics)
        self.names = tuple(sorted(names))
        """Names of all metrics of the steps."""

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
        """Return the metrics of a step that the journal contains."""
        values = ((name, float(column[number])) for name, column in self._own.items())
        return {name: value for name, value in values if math.isfinite(value)}


_HEAD: Final = ("step", "version", "time_s")
_BATCH_ROWS: Final = 10_000
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a field that spreadsheets evaluate."""


def write_csv(records: StepRecords, path: Path) -> None:
    """Write the table as UTF-8 text. A field is empty if the step has no such metric."""
    with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*_HEAD, *map(_no_formula, records.names)])
        for record in records:
            values = (record.metrics.get(name) for name in records.names)
            rows.writerow([record.step, record.version, record.time_s, *map(_text, values)])


def _no_formula(name: str) -> str:
    """Return a column's name as text that no spreadsheet evaluates: runs may be untrusted."""
    return f"'{name}" if name.startswith(_FORMULA) else name


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)


def write_parquet(records: StepRecords, path: Path) -> None:
    """Write the table. A value is null if the step has no such metric."""
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


_OWN_TOOLS: Final = ("csv", "parquet", "mlflow")


def tools() -> tuple[str, ...]:
    """Return the names of possible exports: tables, and trackers."""
    return (*_OWN_TOOLS, *all_trackers())


def counts_samples(tool: str) -> bool:
    """Return whether this tool's x axis can count samples."""
    return tool not in _OWN_TOOLS and all_trackers()[tool].can_count_samples


class NotExported(OffbeatError):
    """A run that cannot be exported as requested.

    Fix: follow the message.
    """

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}"


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export: its place and size."""

    steps: int
    metrics: int
    where: str
    look: str  # command that shows it; empty for a table
    unreadable_lines: int


def export(run_dir: Path, tool: str, output: str | None, *, in_samples: bool = False) -> Exported:
    """Write the metrics of ``run_dir`` for one of ``tools()``.

    ``output`` is a file (csv, parquet), a tracking URI (mlflow) or a directory (trackers). None: a
    place inside the run directory. ``in_samples``: the x axis counts samples.

    Raises:
        NotARun, JournalCorrupt, JournalVersion: As ``read_events``.
        LinkRefused: The place inside the run directory is a link.
        NotExported: The place exists or is unsuitable, or the x axis is unknown.
        SinkUnusable: The tool is not installed, or does not answer.
        FixableError: A tracker cannot use the place.
        OSError: The place cannot be written.
    """
    if output is None:
        check_not_linked(run_dir, tool)
    records = StepRecords(run_dir)
    recipe = readable_values(run_dir / CONFIG)  # names and parameters, which metrics do not need
    name = str(recipe.get("name", run_dir.resolve().name))
    where, look = output or "", ""
    match tool:
        case "csv":
            where = output or str(run_dir / "metrics.csv")
            write_csv(records, _table(where, tool))
        case "parquet":
            where = output or str(run_dir / "metrics.parquet")
            write_parquet(records, _table(where, tool))
        case "mlflow":
            where = output or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
            look = f"mlflow ui --backend-store-uri {where}"
            sink = MlflowSink(where, run_id=records.run_id, run_name=name, recipe=recipe)
            _write(records, sink)
        case _:
            per_step = _samples_per_step(recipe) if in_samples else 1
            run = TrackedRun(records.run_id, name, run_dir, recipe, per_step)
            place = all_trackers()[tool].export_place(run, output)
            if place is None:
                raise NotExported(f"{tool} has no export", f"Use one of {', '.join(_OWN_TOOLS)}")
            where, look = place.where, place.look
            _write(records, place.sink)
    return Exported(len(records), len(records.names), where, look, records.unreadable_lines)


def _table(where: str, tool: str) -> Path:
    """Return the path of a table. Its required ending protects other files from ``--output``."""
    path = Path(where)
    if path.suffix != f".{tool}" or (path.exists() and not path.is_file()):
        raise NotExported(
            f"--output {where} is not a valid name for a {tool} file",
            f"Name a file that ends in .{tool}: an existing file is replaced",
        )
    if not path.parent.is_dir():
        raise NotExported(f"--output {where}: {path.parent} is not a directory", "Make it first")
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
