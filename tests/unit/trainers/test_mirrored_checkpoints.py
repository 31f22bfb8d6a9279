"""Checkpoints of a trainer whose machine does not see the run directory: what counts is there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.messages.failures import CheckpointFailed
from offbeat.run_files.files import RunFiles
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.checkpoints.rank_store import MirroredCheckpoints, RankCheckpoints
from offbeat.trainers.ranks.peers import SingleRank

IDENTITY = Identity("stub", "a stub", "f" * 32)


class Unreachable(RunFiles):
    """The driver's machine, from which nothing is heard any more once it is cut off."""

    cut = False

    def write(self, name: str, offset: int, data: bytes, nbytes: int) -> None:
        if self.cut:
            raise OSError("no answer within 60 s")
        super().write(name, offset, data, nbytes)


class Machine:
    """A machine on which a trainer is started, with a disk of its own."""

    def __init__(self, disk: Path, files: RunFiles) -> None:
        self.root = disk / "checkpoints"
        store = RankCheckpoints(self.root, IDENTITY, keep=2, peers=SingleRank())
        self.store = MirroredCheckpoints(store, self.root, files)

    def save(self, version: int, content: bytes = b"") -> None:
        def write(directory: Path) -> None:
            (directory / "weights").write_bytes(content or str(version).encode())

        self.store.save(version, f"d{version}{content}", 10, write)

    def rewind(self, at_most: int) -> tuple[int, bytes] | None:
        """The version taken up, and its content, as read on this machine."""
        found = self.store.rewind(at_most)
        if found is None:
            return None
        assert found.directory.is_relative_to(self.root)
        read = list[bytes]()
        self.store.load(found, lambda directory: read.append((directory / "weights").read_bytes()))
        return found.version, read[0]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def start(tmp_path: Path, run_dir: Path) -> Callable[..., Machine]:
    def on(name: str, files: RunFiles | None = None) -> Machine:
        return Machine(tmp_path / name, files or RunFiles(run_dir))

    return on


def kept(run_dir: Path) -> dict[str, str]:
    """Names in the run directory, with what they hold."""
    folder = run_dir / "checkpoints"
    files = {path.name: path for path in folder.iterdir()}
    return {
        name: (path if path.is_file() else path / "weights").read_text().strip()
        for name, path in sorted(files.items())
    }


def test_what_is_saved_is_in_the_run_directory_and_older_ones_go(
    run_dir: Path, start: Callable[..., Machine]
) -> None:
    machine = start("a")
    assert machine.rewind(0) is None
    for version in (2, 4, 6):
        machine.save(version)
    assert kept(run_dir) == {"LATEST": "state_6", "state_4": "4", "state_6": "6"}


def test_a_trainer_on_another_machine_takes_up_what_the_lost_one_saved(
    run_dir: Path, start: Callable[..., Machine]
) -> None:
    lost = start("a")
    lost.save(2)
    lost.save(4)
    other = start("b")
    assert other.rewind(5) == (4, b"4")
    other.save(6)
    other.save(8)
    assert kept(run_dir) == {"LATEST": "state_8", "state_6": "6", "state_8": "8"}
    assert start("a").rewind(8) == (8, b"8"), "what it still has is older"


def test_a_rewind_sets_aside_in_the_run_directory_too(
    run_dir: Path, start: Callable[..., Machine]
) -> None:
    machine = start("a")
    machine.save(2)
    machine.save(4)
    assert start("b").rewind(3) == (2, b"2")
    assert kept(run_dir) == {"LATEST": "state_2", "abandoned_4": "4", "state_2": "2"}
    again = start("c")
    assert again.rewind(9) == (2, b"2")
    again.save(4, b"of the new lineage")
    assert kept(run_dir) == {
        "LATEST": "state_4",
        "state_2": "2",
        "state_4": "of the new lineage",
    }


def test_a_rewind_to_the_initial_model_leaves_no_latest(
    run_dir: Path, start: Callable[..., Machine]
) -> None:
    machine = start("a")
    machine.save(2)
    assert machine.rewind(1) is None
    assert kept(run_dir) == {"abandoned_2": "2"}


def test_a_checkpoint_that_did_not_arrive_has_failed_and_is_never_taken_up(
    run_dir: Path, start: Callable[..., Machine]
) -> None:
    files = Unreachable(run_dir)
    machine = start("a", files)
    machine.save(2)
    files.cut = True
    with pytest.raises(CheckpointFailed, match="no answer within 60 s"):
        machine.save(4)
    assert kept(run_dir) == {"LATEST": "state_2", "state_2": "2"}
    assert machine.rewind(4) == (2, b"2")
    files.cut = False
    machine.save(4)
    assert kept(run_dir) == {"LATEST": "state_4", "state_2": "2", "state_4": "4"}


def test_what_was_damaged_on_the_way_is_not_taken_up(
    run_dir: Path, start: Callable[..., Machine]
) -> None:
    machine = start("a")
    machine.save(2)
    machine.save(4)
    (run_dir / "checkpoints" / "state_4" / "weights").write_bytes(b"?")
    assert start("b").rewind(4) == (2, b"2")
    assert kept(run_dir) == {"LATEST": "state_2", "corrupt_4": "?", "state_2": "2"}


def test_the_exported_models_beside_them_are_left_alone(
    run_dir: Path, start: Callable[..., Machine]
) -> None:
    exported = run_dir / "checkpoints" / "step_1"
    exported.mkdir(parents=True)
    (exported / "weights").write_text("model")
    machine = start("a")
    assert machine.rewind(0) is None
    machine.save(2)
    assert kept(run_dir)["step_1"] == "model"
    assert not (machine.root / "step_1").exists()
