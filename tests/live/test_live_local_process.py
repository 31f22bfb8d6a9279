"""Several local runs in one process, and runs that end by a bug: what they show, write and leave."""

import gc
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from local_runs import LIMIT_S, drive_locally, started

from offbeat.controller.failpoints import Failpoint
from offbeat.local.parts import Makers
from offbeat.messages.failures import RemoteBug
from offbeat.telemetry.summary import Summary
from tests.support.live_run import offbeat, until
from tests.support.own_logging import own_logging

STEPS = 3
QUICK = (f"steps={STEPS}", "stub.median_rollout_s=0.01", "stub.step_s=0.01")
NO_MAKERS = cast("Makers", object())
"""A bug: the controller finds nothing that makes its parts."""


@pytest.fixture(autouse=True)
def logging_of_the_tests() -> Iterator[None]:
    yield from own_logging()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Check that a test leaves no thread, and no open file of a run."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    until("its threads have ended", lambda: set(threading.enumerate()) <= before, within_s=90)
    opened = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    assert [path for path in opened if path.is_relative_to(tmp_path)] == []


def fail_at(point: Failpoint) -> Makers:
    def fail(reached: Failpoint) -> None:
        if reached is point:
            raise KeyError("a bug")

    return Makers(failpoints=fail)


def read_summary(run_dir: Path) -> Summary:
    return Summary.from_json((run_dir / "summary.json").read_bytes())


def logged(run_dir: Path, process: str) -> list[dict[str, Any]]:
    text = (run_dir / "logs" / f"{process}.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_runs_in_one_process_have_a_log_each_also_after_a_run_that_failed(tmp_path: Path) -> None:
    makers = {
        "failed": fail_at(Failpoint.APPLIED), "unmade": NO_MAKERS, "first": Makers(),
        "second": Makers(),
    }  # fmt: skip
    codes = {name: drive_locally(tmp_path / name, each, QUICK) for name, each in makers.items()}
    assert codes == {"failed": 1, "unmade": 1, "first": 0, "second": 0}
    for name in makers:
        run_dir = tmp_path / name
        run_id = read_summary(run_dir).run_id
        driver, controller = logged(run_dir, "driver"), logged(run_dir, "controller")
        assert {line["run_id"] for line in (*driver, *controller)} == {run_id}
        assert [line["event"] for line in driver] == ["run.began", "run.ended"]
        events = [line["event"] for line in controller]
        assert events.count("journal.read") == 1
        assert ("trainer.ready" in events) == (name != "unmade")
        assert not [line for line in controller if "ResourceWarning" in line["event"]]


@pytest.mark.parametrize(
    ("makers", "bug", "steps"),
    [
        pytest.param(NO_MAKERS, "AttributeError", 0, id="while-it-is-assembled"),
        pytest.param(fail_at(Failpoint.APPLIED_DURABLE), "KeyError", 1, id="in-a-pump"),
    ],
)
def test_a_bug_of_the_controller_fails_the_run_by_name_and_the_run_can_be_resumed(
    tmp_path: Path, makers: Makers, bug: str, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert drive_locally(run_dir, makers, QUICK) == 1
    shown = capsys.readouterr()
    assert bug in shown.err and "Traceback" not in shown.out + shown.err
    assert f"offbeat report {run_dir}" in shown.out
    failed = read_summary(run_dir)
    assert (failed.outcome, failed.steps) == ("failed", steps)
    assert bug in str(failed.error)
    traced = [line for line in logged(run_dir, "controller") if bug in line.get("exception", "")]
    assert traced, "the log has the traceback"
    assert offbeat("report", run_dir)[0] == 0
    code, text = offbeat("replay", run_dir)
    assert (code, "ended before its first record" in text) == ((0, False) if steps else (2, True))
    assert drive_locally(run_dir, Makers(), resume=True) == 0
    summary = read_summary(run_dir)
    assert (summary.outcome, summary.trainer_version) == ("finished", STEPS)


def test_a_question_that_raises_ends_the_run_at_once_with_its_cause(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(run_dir, Makers(), ["steps=100000", "stub.step_s=0.01"]) as controller:
        controller.ask(lambda host: host.run_id).result(LIMIT_S)
        began_s = time.monotonic()
        controller.ask(lambda host: {}["a bug"])
        with pytest.raises(RemoteBug, match=r"KeyError in answer: 'a bug' File .*_process\.py"):
            controller.ended.result(LIMIT_S)
    assert time.monotonic() - began_s < 30
    summary = read_summary(run_dir)
    assert summary.outcome == "failed"
    assert "controller raised KeyError in answer: 'a bug'" in str(summary.error)
