"""Whether a process writes where the driver reads."""

import pickle
from pathlib import Path

import pytest

from offbeat.run_files.files import RunFiles
from offbeat.run_files.shared_directory import RunDirNotShared, RunDirToken, is_shared, new_token


class Driver:
    """The driver's side of the proof: its own directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def sees(self, token: RunDirToken) -> bool:
        return RunFiles(self.run_dir).sees(token)


def test_a_process_that_sees_the_token_and_is_seen_shares_the_directory(tmp_path: Path) -> None:
    with new_token(tmp_path) as token:
        assert is_shared(tmp_path, token, None)
        assert is_shared(tmp_path, token, Driver(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_the_same_name_on_another_machine_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with new_token(here) as token, new_token(there):
        assert not is_shared(there, token, Driver(here))
        assert not is_shared(there, token, None), "nor by a process on the machine of the driver"
        (there / token.name).write_text("of a former run")
        assert not is_shared(there, token, Driver(here))
        assert not is_shared(tmp_path / "nowhere", token, Driver(here))


def test_one_that_sees_a_copy_whose_changes_stay_where_they_are_does_not_share(
    tmp_path: Path,
) -> None:
    """As a container does whose directory is an overlay."""
    here, copy = tmp_path / "here", tmp_path / "copy"
    here.mkdir()
    copy.mkdir()
    with new_token(here) as token:
        (copy / token.name).write_text(token.content)
        assert not is_shared(copy, token, Driver(here))
        assert [path.name for path in copy.iterdir()] == [token.name]


def test_one_that_may_only_read_does_not_share(tmp_path: Path) -> None:
    with new_token(tmp_path) as token:
        loop = tmp_path / "loop"
        loop.mkdir()
        (loop / token.name).write_text(token.content)
        loop.chmod(0o555)
        seen = is_shared(loop, token, Driver(tmp_path))
        loop.chmod(0o755)
        assert not seen


def test_tokens_that_killed_drivers_left_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".offbeat-0123").write_text("x")
    (tmp_path / "config.yaml").write_text("steps: 1")
    with new_token(tmp_path):
        assert len(list(tmp_path.glob(".offbeat-*"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_token_is_never_written_through_a_link(tmp_path: Path) -> None:
    with new_token(tmp_path) as token:
        path = tmp_path / token.name
        assert path.stat().st_nlink == 1 and not path.is_symlink()
    with pytest.raises(OSError, match="No such file"), new_token(tmp_path / "missing"):
        pytest.fail("made")


def test_the_driver_is_asked_for_names_of_its_own_directory_only(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text("s")
    files = RunFiles(tmp_path / "run")
    assert not files.sees(RunDirToken("../secret", "s"))
    assert not files.sees(RunDirToken(str(tmp_path / "secret"), "s"))


def test_the_error_says_who_where_and_what_to_do() -> None:
    error = RunDirNotShared("trainer-rank1", "gpu-7", "/runs/a", "Share it")
    told = "trainer-rank1 on gpu-7 does not see the driver's run directory /runs/a. Share it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == told  # noqa: S301 - our own
