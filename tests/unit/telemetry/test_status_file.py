"""`status.json`: written often enough, whole, and never at the run's expense."""

from pathlib import Path

import msgspec
import pytest

from offbeat.telemetry.status_file import STATUS_FILE, Status, StatusFile, StatusRecord


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def written(run_dir: Path) -> StatusRecord:
    return msgspec.json.decode((run_dir / STATUS_FILE).read_bytes(), type=StatusRecord)


def status(step: int) -> Status:
    return Status(step=step, steps=10, phase="running")


def test_the_file_is_at_most_two_seconds_behind(tmp_path: Path, clock: Clock) -> None:
    file = StatusFile(tmp_path, "run-1", clock=clock)
    for step, at_s in enumerate([1000.0, 1000.5, 1001.9, 1002.0], start=1):
        clock.now_s = at_s
        file.update(status(step))
        assert written(tmp_path).status.step == (4 if step == 4 else 1)
    assert (written(tmp_path).run_id, written(tmp_path).unix_s) == ("run-1", 1002.0)
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_FILE], "nothing is left beside it"


def test_a_clock_that_was_set_back_does_not_stop_it(tmp_path: Path, clock: Clock) -> None:
    file = StatusFile(tmp_path, "run-1", clock=clock)
    file.update(status(1))
    clock.now_s = 10.0
    file.update(status(2))
    assert written(tmp_path).status.step == 2


def test_a_disk_that_refuses_costs_nothing_but_the_file(tmp_path: Path, clock: Clock) -> None:
    file = StatusFile(tmp_path / "gone", "run-1", clock=clock)
    file.update(status(1))
    (tmp_path / "gone").mkdir()
    clock.now_s += 2
    file.update(status(2))
    assert written(tmp_path / "gone").status.step == 2


def test_a_record_is_fresh_for_some_missed_writes(tmp_path: Path, clock: Clock) -> None:
    StatusFile(tmp_path, "run-1", clock=clock).update(status(1))
    record = written(tmp_path)
    assert record.is_fresh(1010.0) and record.is_fresh(995.0)
    assert not record.is_fresh(1020.0)
