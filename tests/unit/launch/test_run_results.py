"""A ``Run`` whose directory is gone, whose packages are absent, or that is not live."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from offbeat.controller.commands import Stop
from offbeat.launch.control import take_commands
from offbeat.launch.run import LiveRun, NothingExported, Run, RunRefused
from offbeat.launch.session import RunEnd, Session
from offbeat.runs.past_run import NotARun
from offbeat.runs.results import NoSuchMetric, read_curve
from offbeat.telemetry.records import MetricRecord, encode_line


@pytest.mark.plugins
@pytest.mark.parametrize(
    "read",
    [
        Run.metrics,
        Run.evaluations,
        Run.failures,
        Run.samples,
        Run.plot,
        Run.report,
        lambda run: run.summary,
        lambda run: run.config,
        lambda run: run.model_path,
    ],
)
def test_a_run_whose_directory_was_deleted_is_no_run(
    tmp_path: Path, read: Callable[[Run], Any]
) -> None:
    with pytest.raises(NotARun, match="no such directory"):
        read(Run(tmp_path / "deleted"))


def test_a_run_shows_how_it_ended(tmp_path: Path) -> None:
    assert repr(Run(tmp_path)) == f"Run({str(tmp_path)!r})"
    (tmp_path / "summary.json").write_text('{"outcome": "failed", "steps": 3}')
    assert repr(Run(tmp_path)) == f"Run({str(tmp_path)!r}, failed after step 3)"
    assert repr(Run(tmp_path / "deleted")).endswith("deleted')")


@pytest.mark.parametrize(
    ("summary", "fix"),
    [
        ("", "A run writes its model at its end"),
        ('{"outcome": "aborted", "steps": 0}', "It has trained no step"),
        ('{"outcome": "aborted", "steps": 58}', "steps=58) writes its model"),
    ],
)
def test_a_run_without_a_model_says_how_to_get_one(tmp_path: Path, summary: str, fix: str) -> None:
    if summary:
        (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(NothingExported, match=re.escape(fix)):
        Run(tmp_path).load()


def test_a_metric_that_is_not_there_is_named_with_those_like_it(tmp_path: Path) -> None:
    with pytest.raises(NoSuchMetric, match=r"no train/reward yet"):
        Run(tmp_path).plot()
    step = MetricRecord(1, 1, 1.0, {"train/reward": 0.5})
    scored = MetricRecord(2, 2, 2.0, {"eval/reward": 0.75})
    (tmp_path / "metrics.jsonl").write_bytes(encode_line(step) + encode_line(scored))
    with pytest.raises(KeyError, match=r"Did you mean train/reward\?"):
        Run(tmp_path).plot("train/rewad")
    curve = read_curve(tmp_path, "train/reward")
    assert (curve.versions, curve.values, curve.is_of_evaluations) == ((1,), (0.5,), False)
    curve = read_curve(tmp_path, "eval/reward")
    assert (curve.versions, curve.values, curve.is_of_evaluations) == ((2,), (0.75,), True)


def test_samples_of_a_run_that_has_not_begun_are_asked_for_too_early(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    with pytest.raises(NotARun, match="has not begun yet"):
        Run(tmp_path).samples()


@pytest.mark.parametrize("has_step", [True, False])
def test_a_stop_lets_a_run_end_its_step_once_it_has_trained_one(
    tmp_path: Path, *, has_step: bool
) -> None:
    (tmp_path / "config.yaml").write_text("steps: 9\n")
    step = MetricRecord(1, 1, 1.0, {"train/reward": 0.5})
    (tmp_path / "metrics.jsonl").write_bytes(encode_line(step) if has_step else b"")
    session, may_end = Session.silent(), threading.Event()

    def run() -> RunEnd:
        session.directory = tmp_path
        session.opened.set()
        may_end.wait()
        return RunEnd(2, problems=("the end of this test",))

    live = LiveRun(session, run)
    live.stop()
    commands = [msgspec.json.decode(each, type=Stop) for each in take_commands(tmp_path)]
    may_end.set()
    with pytest.raises(RunRefused, match="the end of this test"):
        live.wait()
    assert commands == ([Stop("run.stop()")] if has_step else [])
    assert session.signals.reason == ("" if has_step else "run.stop()")


@pytest.mark.parametrize("name", ["wait", "stop", "is_alive"])
def test_a_run_of_a_directory_says_who_can_wait_and_stop(tmp_path: Path, name: str) -> None:
    with pytest.raises(AttributeError, match=r"the Run that offbeat\.start\(\) returned"):
        getattr(Run(tmp_path), name)
    assert not hasattr(Run(tmp_path), "loss")


@pytest.mark.parametrize(("absent", "call"), [("matplotlib", "plot()"), ("transformers", "load()")])
def test_a_result_that_misses_its_package_names_it(tmp_path: Path, absent: str, call: str) -> None:
    program = f"""
import sys
sys.modules[{absent!r}] = None  # a module that is None cannot be imported
from pathlib import Path
from offbeat.launch.run import Run
from offbeat.messages.missing_package import PackageMissing
try:
    Run(Path({str(tmp_path)!r})).{call}
except PackageMissing as error:
    print(error.package)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{absent}\n"
