"""What TensorBoard, MLflow and W&B read of an export is what the run recorded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from offbeat.launch.commands.main import app
from offbeat.plugins.export.exporting import StepRecords
from offbeat.plugins.tensorboard.sink import TensorBoardSink
from offbeat.telemetry.records import MetricRecord
from tests.export.wandb_file import history


def offbeat(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Step and value of each point that TensorBoard shows."""
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator: Any = pytest.importorskip(module, reason="the extra tensorboard is not installed")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    if tag in tags["scalars"]:
        return [(point.step, point.value) for point in events.Scalars(tag)]
    return [(each.step, each.tensor_proto.float_val[0]) for each in events.Tensors(tag)]


@pytest.mark.parametrize(("axis", "per_step"), [("steps", 1), ("samples", 64)])
def test_tensorboard_shows_each_step_that_stands_once(
    run_dir: Path, tmp_path: Path, axis: str, per_step: int
) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    done = offbeat("export", run_dir, "--to", "tensorboard", "-o", tmp_path, "--x-axis", axis)
    assert done.exit_code == 0, done.output
    records = list(StepRecords(run_dir))
    for name in ("train/reward", "train/grad_norm"):
        points = curve(tmp_path / "one", name)
        expected = [
            (record.version * per_step, record.metrics[name])
            for record in records
            if name in record.metrics
        ]
        assert [step for step, _ in points] == [step for step, _ in expected]
        np.testing.assert_allclose(
            [value for _, value in points], [value for _, value in expected], rtol=1e-6
        )


def test_tensorboard_forgets_what_a_rewind_and_a_new_process_write_again(tmp_path: Path) -> None:
    def record(version: int, value: float) -> MetricRecord:
        return MetricRecord(version, version, float(version), {"train/reward": value})

    first = TensorBoardSink(tmp_path)
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    first.open()
    for version in (1, 2, 3, 4):
        first.write(record(version, 0.0))
    first.write(record(3, 1.0))  # the trainer was restored at version 2
    first.close()
    second = TensorBoardSink(tmp_path)  # of a resumed run
    second.open()
    second.write(record(3, 2.0))
    second.write(record(4, 2.0))
    second.close()
    assert curve(tmp_path, "train/reward") == [(1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0)]


def test_tensorboard_shows_an_evaluation_that_ended_steps_later_at_the_version_scored(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    sink = TensorBoardSink(tmp_path)
    sink.open()
    for version in (1, 2, 3):
        sink.write(MetricRecord(version, version, float(version), {"train/reward": 0.5}))
    sink.write(MetricRecord(2, 2, 3.5, {"eval/reward": 0.25}))
    sink.write(MetricRecord(4, 4, 4.0, {"train/reward": 0.5}))
    sink.close()
    assert [step for step, _ in curve(tmp_path, "train/reward")] == [1, 2, 3, 4]
    assert curve(tmp_path, "eval/reward") == [(2, 0.25)]


def test_a_second_export_into_the_same_directory_is_refused(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    assert offbeat("export", run_dir, "--to", "tensorboard", "-o", tmp_path).exit_code == 0
    again = offbeat("export", run_dir, "--to", "tensorboard", "-o", tmp_path)
    assert again.exit_code == 2
    assert "has files of events already. Name another directory" in again.stderr


READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
(experiment,) = client.search_experiments(filter_string="name = 'offbeat'")
(run,) = client.search_runs([experiment.experiment_id])
points = client.get_metric_history(run.info.run_id, "train/reward")
print(json.dumps({
    "points": [(point.step, point.value) for point in points],
    "names": len(run.data.metrics), "params": run.data.params, "tags": run.data.tags,
    "status": run.info.status, "name": run.info.run_name,
}))
"""


def test_mlflow_has_the_run_with_its_recipe_and_every_step(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    # MLflow warns of itself and forks: it gets processes of its own.
    for args in (
        ["-m", "offbeat", "export", str(run_dir), "--to", "mlflow", "-o", uri],
        ["-c", READ_MLFLOW, uri],
    ):
        done = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    records = StepRecords(run_dir)
    assert found["status"] == "FINISHED"
    assert found["tags"]["offbeat.run_id"] == records.run_id
    assert found["params"]["groups_per_step"] == "8"
    assert found["names"] == len(records.names)
    assert found["points"] == [
        [record.version, record.metrics["train/reward"]] for record in records
    ]


def test_wandb_has_every_step_that_stands_once_in_its_offline_file(
    run_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    # wandb starts a service: it gets a process of its own.
    command = ["-m", "offbeat", "export", str(run_dir), "--to", "wandb", "-o", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {step["_step"]: step for step in history(tmp_path)}
    records = list(StepRecords(run_dir))
    assert list(found) == [record.version for record in records]
    for record in records:
        shown = {name: found[record.version].get(name) for name in record.metrics}
        assert shown == pytest.approx(record.metrics, nan_ok=True)
