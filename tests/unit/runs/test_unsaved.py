"""What a person is told of steps that no checkpoint has."""

from pathlib import Path

import pytest

from offbeat.runs.unfinished import describe_unsaved_steps


def latest(run_dir: Path, name: str) -> Path:
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "LATEST").write_text(name)
    return run_dir


def test_a_run_whose_last_version_is_in_a_checkpoint_is_not_spoken_of(tmp_path: Path) -> None:
    assert describe_unsaved_steps(latest(tmp_path, "state_288"), 288) == ""
    assert describe_unsaved_steps(tmp_path / "nothing was trained", 0) == ""


def test_steps_since_the_newest_checkpoint_are_told_with_both_versions(tmp_path: Path) -> None:
    told = describe_unsaved_steps(latest(tmp_path, "state_200\n"), 288)
    assert "no checkpoint of version 288" in told and "of version 200," in told


@pytest.mark.parametrize("name", ["", "state_", "state_x", "\xff"])
def test_a_damaged_name_counts_as_no_checkpoint(tmp_path: Path, name: str) -> None:
    assert "initial model" in describe_unsaved_steps(latest(tmp_path, name), 3)
