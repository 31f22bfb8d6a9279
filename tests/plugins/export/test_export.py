"""``offbeat export``: the steps that stand, as tables; other tools in tests/export."""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from offbeat.launch.commands.main import app
from offbeat.plugins.export.exporting import MlflowSink, StepRecords, write_csv
from offbeat.plugins.tensorboard.sink import TensorBoardSink
from offbeat.telemetry.records import MetricRecord, encode_line, read_metrics
from tests.support.shown_run import ShownRun, empty, running, with_losses, without_numbers


def offbeat(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_losses(tmp_path_factory.mktemp("runs") / "one", steps=40)


def test_steps_that_a_rewind_undid_are_left_out_and_the_later_record_of_a_step_holds(
    run_dir: Path,
) -> None:
    written = read_metrics(run_dir / "metrics.jsonl")
    records = StepRecords(run_dir)
    assert len(written) > 40, "the run trained some steps twice"
    assert [record.version for record in records] == list(range(1, 41))
    last = {record.version: record for record in written}
    for record in records:
        assert record.metrics.items() >= last[record.version].metrics.items()
        assert record.time_s == last[record.version].time_s


def test_a_step_without_a_record_has_what_the_journal_knows(tmp_path: Path) -> None:
    shown = ShownRun(tmp_path / "run", 3)
    for number in range(3):
        shown.step(recorded=number != 1)
    records = list(StepRecords(shown.write()))
    assert [record.version for record in records] == [1, 2, 3]
    assert set(records[1].metrics) == {
        *("train/reward", "off_policy/staleness_mean", "off_policy/staleness_max")
    }
    assert records[0].time_s < records[1].time_s < records[2].time_s


def test_an_evaluation_of_the_initial_weights_is_a_row_before_all_steps(tmp_path: Path) -> None:
    shown = ShownRun(tmp_path / "run", 3)
    shown.lines.append(encode_line(MetricRecord(0, 0, 1.0, {"eval/reward": 0.125})))
    for _ in range(3):
        shown.step()
    records = list(StepRecords(shown.write()))
    assert [record.version for record in records] == [0, 1, 2, 3]
    assert records[0].metrics == {"eval/reward": 0.125}


def test_csv_and_parquet_have_a_row_per_step_and_the_same_numbers(
    run_dir: Path, tmp_path: Path
) -> None:
    for name in ("a.csv", "a.parquet"):
        path = tmp_path / name
        assert offbeat("export", run_dir, "--to", path.suffix[1:], "-o", path).exit_code == 0
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert len(rows) == len(table) == 40
    for text, number in zip(rows, table, strict=True):
        assert {name: value and float(value) for name, value in text.items()} == {
            name: "" if value is None else value for name, value in number.items()
        }


def test_an_export_goes_into_the_run_directory_unless_told_otherwise(tmp_path: Path) -> None:
    run = running(tmp_path / "run")
    done = offbeat("export", run, "--to", "csv")
    assert done.stdout.startswith(f"{run / 'metrics.csv'}  40 steps of ")
    assert {path.name for path in run.iterdir() if "csv" in path.name} == {"metrics.csv"}


@pytest.mark.parametrize("place", ["run/metrics.jsonl", "run/config.yaml", "metrics.txt", "a.csv"])
def test_a_table_replaces_no_file_that_is_none_and_no_directory(tmp_path: Path, place: str) -> None:
    run = with_losses(tmp_path / "run", steps=2)
    (tmp_path / "a.csv").mkdir()
    (run / "config.yaml").write_text("steps: 2\n")
    before = (run / "metrics.jsonl").read_bytes()
    done = offbeat("export", run, "--to", "csv", "-o", tmp_path / place)
    assert done.exit_code == 2
    assert "Name a file that ends in .csv" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (run / "config.yaml").read_text() == "steps: 2\n"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "a.csv"}


@pytest.mark.parametrize(
    ("tool", "place"), [("wandb", "wandb"), ("tensorboard", "tensorboard"), ("mlflow", "mlflow.db")]
)
def test_an_export_follows_no_link_of_a_run(tmp_path: Path, tool: str, place: str) -> None:
    run = with_losses(tmp_path / "run", steps=2)
    (tmp_path / "victim").mkdir()
    (run / place).symlink_to(tmp_path / "victim")
    refused = offbeat("export", run, "--to", tool)
    assert refused.exit_code == 2
    assert "is a symbolic link" in " ".join(refused.stderr.split())
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_name_that_a_spreadsheet_would_evaluate_is_text_in_a_csv_file(tmp_path: Path) -> None:
    run = with_losses(tmp_path / "run", steps=2)
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    hostile = "".join(f"{json.dumps({**line, '=cmd/calc': 1.0})}\n" for line in lines)
    metrics.write_text(hostile)
    assert offbeat("export", run, "--to", "csv").exit_code == 0
    with (run / "metrics.csv").open() as file:
        head = next(csv.reader(file))
    assert "'=cmd/calc" in head
    assert "=cmd/calc" not in head


def test_an_export_to_a_table_that_another_export_writes_is_whole(tmp_path: Path) -> None:
    records = StepRecords(with_losses(tmp_path / "run", steps=3))
    path = tmp_path / "a.csv"
    rows = iter(records)

    class Meanwhile(StepRecords):
        def __iter__(self) -> Iterator[MetricRecord]:
            for row in rows:
                write_csv(records, path)
                yield row

    write_csv(Meanwhile(tmp_path / "run"), path)
    assert len(path.read_text().splitlines()) == 1 + len(records)
    assert {each.name for each in tmp_path.iterdir()} == {"run", "a.csv"}


def test_numbers_that_are_none_and_a_run_without_steps_are_exported(tmp_path: Path) -> None:
    for run in (without_numbers(tmp_path / "nan"), empty(tmp_path / "empty")):
        for tool in ("csv", "parquet"):
            assert offbeat("export", run, "--to", tool).exit_code == 0
    (row,) = pq.read_table(tmp_path / "nan" / "metrics.parquet").to_pylist()
    assert math.isnan(row["train/grad_norm"])
    assert row["eval/reward"] == -math.inf
    assert pq.read_table(tmp_path / "empty" / "metrics.parquet").num_rows == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--to", "excel"), "Use one of csv, parquet, mlflow, wandb, tensorboard."),
        (("--to", "csv", "--x-axis", "samples"), "--x-axis samples needs --to tensorboard"),
        (("--to", "tensorboard", "--x-axis", "days"), "Use steps or samples."),
        (("--to", "tensorboard", "--x-axis", "samples"), "does not say how many samples"),
        (("--to", "csv", "-o", "/dev/null/metrics.csv"), "/dev/null is not a directory. Make it"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    run_dir: Path, options: tuple[str, ...], says: str
) -> None:
    done = offbeat("export", run_dir, *options)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    done = offbeat("export", tmp_path, "--to", "csv")
    assert done.exit_code == 2
    assert "it holds no journal" in done.stderr


def test_sinks_of_optional_packages_can_be_made_and_closed_without_them(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path).close()
    MlflowSink("sqlite:///x.db", run_id="r", run_name="n", recipe={}).close()
    assert list(tmp_path.iterdir()) == []


def test_an_export_has_the_metrics_of_a_step_beside_those_of_the_evaluation(tmp_path: Path) -> None:
    shown = ShownRun(tmp_path / "run", steps=16)  # evaluates every second step
    for _ in range(4):
        shown.step()
    write_csv(StepRecords(shown.write()), tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["eval/reward"]) for row in rows] == [False, True, False, True]
    assert all(row["train/grad_norm"] and row["time/step_s"] for row in rows)
