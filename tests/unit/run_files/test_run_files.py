"""What processes of other machines may write into a run directory, and what arrives."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.run_files.files import (
    CHUNK_BYTES,
    BadName,
    Fingerprint,
    RunFiles,
    TooMuch,
    fingerprints,
)
from offbeat.run_files.transfer import fetch, send


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


class Cut(RunFiles):
    """The way there breaks after so many calls that write."""

    def __init__(self, run_dir: Path, calls: int) -> None:
        super().__init__(run_dir)
        self.calls = calls

    def write(self, name: str, offset: int, data: bytes, nbytes: int) -> None:
        self._count()
        super().write(name, offset, data, nbytes)

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)

    def _count(self) -> None:
        if not self.calls:
            raise OSError("the network is cut")
        self.calls -= 1


def tree(folder: Path) -> Mapping[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "checkpoints/../../x",
        "../x",
        "/etc/passwd",
        "checkpoints//x",
        "checkpoints/./x",
        "checkpoints/",
        "config.yaml",
        "journal/events-000001.bin",
        "spool/x",
        ".offbeat-x",
        "logs/\0",
        f"logs/{'x' * 256}",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(run_dir: Path, name: str) -> None:
    files = RunFiles(run_dir)
    calls = (
        lambda: files.write(name, 0, b"x", 1),
        lambda: files.append(name, b"x"),
        lambda: files.read(name, 0, 1),
        lambda: files.remove(name),
        lambda: files.rename(name, "logs/x"),
        lambda: files.rename("logs/x", name),
        lambda: files.listing(name),
    )
    for call in calls:
        with pytest.raises(BadName):
            call()
    assert tree(run_dir.parent) == {}


@given(name=st.text(st.sampled_from("ab./\\\0~"), max_size=12))
def test_no_name_whatever_leads_out_of_the_folders(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outer = tmp_path_factory.mktemp("names")
    run_dir = outer / "run"
    (run_dir / "logs").mkdir(parents=True)
    try:
        RunFiles(run_dir).write(f"logs/{name}", 0, b"x", 1)
    except (BadName, OSError):
        return
    (written,) = tree(outer)
    assert written.startswith("run/logs/")


def test_a_link_is_not_followed(run_dir: Path) -> None:
    outside = run_dir.parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "out").symlink_to(outside)
    (run_dir / "logs" / "file").symlink_to(outside / "file")
    files = RunFiles(run_dir)
    with pytest.raises(BadName):
        files.write("logs/out/new", 0, b"x", 1)
    with pytest.raises(OSError, match="symbolic links"):
        files.write("logs/file", 0, b"x", 1)
    with pytest.raises(OSError, match="symbolic links"):
        files.read("logs/file", 0, 1)
    files.remove("logs/out")
    assert tree(outside) == {"file": b"mine"}


def test_a_folder_that_the_owner_linked_to_another_disk_is_written(run_dir: Path) -> None:
    disk = run_dir.parent / "disk"
    disk.mkdir()
    (run_dir / "checkpoints").symlink_to(disk)
    RunFiles(run_dir).write("checkpoints/step_1/model", 0, b"x", 1)
    assert tree(disk) == {"step_1/model": b"x"}


def test_more_than_was_announced_is_refused(run_dir: Path) -> None:
    files = RunFiles(run_dir)
    files.write("logs/a", 0, b"ab", 4)
    with pytest.raises(TooMuch, match="logs/a: 5 bytes were sent, at most 4 are accepted"):
        files.write("logs/a", 2, b"cde", 4)
    with pytest.raises(TooMuch):
        files.write("logs/a", 0, bytes(CHUNK_BYTES + 1), 2 * CHUNK_BYTES)
    with pytest.raises(TooMuch):
        files.write("logs/a", 0, b"", 2**62)
    with pytest.raises(TooMuch):
        files.append("logs/a", bytes(CHUNK_BYTES + 1))
    with pytest.raises(TooMuch):
        files.read("logs/a", 0, CHUNK_BYTES + 1)
    assert tree(run_dir) == {"logs/a": b"ab"}


def test_a_directory_arrives_as_it_is_and_replaces_a_former_one(run_dir: Path) -> None:
    files, source = RunFiles(run_dir), run_dir.parent / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "small").write_bytes(b"s")
    (source / "empty").write_bytes(b"")
    (source / "large").write_bytes(bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail")
    send(files, source, "checkpoints", "state_4")
    assert tree(run_dir / "checkpoints" / "state_4") == tree(source)
    (source / "large").write_bytes(b"other")
    send(files, source, "checkpoints", "state_4")
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["state_4"]
    back = run_dir.parent / "back"
    listing = files.listing("checkpoints")
    assert listing == fingerprints(run_dir / "checkpoints")
    fetch(files, "checkpoints", "state_4", listing["state_4"], back)
    assert tree(back) == tree(source)


def test_what_is_fetched_replaces_what_is_there_and_leaves_nothing_else(run_dir: Path) -> None:
    """A directory that was there, and one that a broken transfer of this process left behind."""
    files = RunFiles(run_dir)
    files.write("checkpoints/step_1/a", 0, b"new", 3)
    back = run_dir.parent / "back"
    for old in (back, run_dir.parent / f".partial_back_{os.getpid()}"):
        old.mkdir()
        (old / "old").write_bytes(b"old")
    fetch(files, "checkpoints", "step_1", files.listing("checkpoints")["step_1"], back)
    assert tree(back) == {"a": b"new"}
    assert sorted(path.name for path in run_dir.parent.iterdir()) == ["back", "run"]


def test_a_single_file_is_fetched_in_place_of_a_directory(run_dir: Path) -> None:
    files = RunFiles(run_dir)
    files.write("logs/a", 0, b"ab", 2)
    back = run_dir.parent / "back"
    (back / "deep").mkdir(parents=True)
    fetch(files, "logs", "a", files.listing("logs")["a"], back)
    assert back.read_bytes() == b"ab"


@pytest.mark.parametrize("calls", range(3))
def test_wherever_the_way_breaks_a_former_directory_is_whole(run_dir: Path, calls: int) -> None:
    source = run_dir.parent / "source"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_bytes(b"1")
    send(RunFiles(run_dir), source, "checkpoints", "step_1")
    (source / "a").write_bytes(b"2")
    with pytest.raises(OSError, match="cut"):
        send(Cut(run_dir, calls), source, "checkpoints", "step_1")
    assert tree(run_dir) == {"checkpoints/step_1/a": b"1", "checkpoints/step_1/b": b"1"}


def test_a_rename_that_is_asked_for_twice_is_made_once(run_dir: Path) -> None:
    """Ray makes a call again when it does not know whether it was made."""
    files = RunFiles(run_dir)
    files.write("rollouts/.partial", 0, b"x", 1)
    files.rename("rollouts/.partial", "rollouts/a")
    files.rename("rollouts/.partial", "rollouts/a")
    assert tree(run_dir) == {"rollouts/a": b"x"}


def test_a_file_that_became_shorter_meanwhile_is_not_taken(run_dir: Path) -> None:
    files = RunFiles(run_dir)
    files.write("logs/a", 0, b"ab", 2)
    content: Fingerprint = (("", 4, ""),)
    with pytest.raises(OSError, match="ends after 2 of 4 bytes"):
        fetch(files, "logs", "a", content, run_dir.parent / "back")
    assert not list(run_dir.parent.glob("*back*"))
