"""The log of trained groups, written by rank 0 wherever its process runs."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from offbeat.messages.fences import StepKey
from offbeat.run_files.files import RunFiles
from offbeat.run_files.sharing import WriteLocation
from offbeat.trainers.rank import open_trained_log

STEP = {"step": 3, "attempt": 2, "version": 3, "prompt_indices": [7, 5]}


class FullDisk(RunFiles):
    def append(self, name: str, data: bytes) -> None:
        raise OSError(f"no space left for {len(data)} bytes of {name}")


@pytest.mark.parametrize("is_remote", [False, True])
def test_each_step_and_restore_is_a_line_in_the_run_directory(
    tmp_path: Path, *, is_remote: bool
) -> None:
    own = tmp_path / "own" if is_remote else tmp_path
    place = WriteLocation(own, RunFiles(tmp_path) if is_remote else None)
    for _ in range(2):  # a restarted process goes on in the same file
        log = open_trained_log(place)
        log.record_step(StepKey(3, 2, 9), 3, [7, 5])
        log.record_restore(1)
        log.close()
    lines = (tmp_path / "logs" / "trained-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [STEP, {"restored": 1}] * 2


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_line_that_cannot_be_written_is_warned_of_and_fails_no_applied_step(
    tmp_path: Path, *, is_remote: bool
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trained-rank0.jsonl").symlink_to("/dev/full")
    place = WriteLocation(tmp_path, FullDisk(tmp_path) if is_remote else None)
    log = open_trained_log(place)
    with capture_logs() as events:
        log.record_step(StepKey(3, 2, 9), 3, [7, 5])
        log.record_restore(1)
    assert [each["event"] for each in events] == ["trained.not_logged"] * 2
    assert "no space left" in events[0]["error"].lower()
