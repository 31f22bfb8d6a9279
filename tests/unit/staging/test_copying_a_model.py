"""Two directories stand for two nodes: crash, damage, a full disk, and what a repetition keeps."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from offbeat.run_files.disk import DISK, Disk
from offbeat.staging.copying import copy_model
from offbeat.staging.manifest import ManifestFile, ModelManifest
from offbeat.staging.outcome import NodeOutcome, StagingVerdict
from offbeat.staging.progress import ProgressMeter
from offbeat.staging.source import DirectorySource, read_manifest

CONTENT = {
    "1.safetensors": b"first shard",
    "2.safetensors": b"second shard",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "config.json": b"{}",
}


class Killed(BaseException):
    """The process ended here: no handler runs, except those that clean up in Python."""


@dataclass
class Model:
    """A model directory and two nodes."""

    source: Path
    nodes: tuple[Path, Path]

    @property
    def manifest(self) -> ModelManifest:
        return read_manifest(self.source, ProgressMeter())

    def stage(self, node: Path, disk: Disk = DISK) -> NodeOutcome:
        seen = DirectorySource(self.source)
        return copy_model(self.manifest, seen, node, ProgressMeter(), disk)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    source = tmp_path / "model"
    for name, content in CONTENT.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    return Model(source, (tmp_path / "node-0/model", tmp_path / "node-1/model"))


def contents(directory: Path) -> dict[str, bytes]:
    """Files that are not hidden."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


class FaultyDisk(Disk):
    """A disk that fails at one call of a kind."""

    def __init__(self, call: str, at: int, error: BaseException) -> None:
        self._call, self._left, self._error = call, at, error

    def append(self, file: int, data: bytes) -> None:
        if self._is_due("append"):
            super().append(file, data[: len(data) // 2])
            raise self._error
        super().append(file, data)

    def sync_appended(self, file: int) -> None:
        if self._is_due("sync_appended"):
            raise self._error
        super().sync_appended(file)

    def rename(self, old: Path, new: Path) -> None:
        if self._is_due("rename"):
            raise self._error
        super().rename(old, new)

    def _is_due(self, call: str) -> bool:
        self._left -= call == self._call
        return call == self._call and self._left == -1


class SmallDisk(Disk):
    def free_bytes(self, directory: Path) -> int:
        del directory
        return 100


def test_every_node_gets_all_files_and_a_second_time_copies_none(model: Model) -> None:
    for node in model.nodes:
        first = model.stage(node)
        assert first.is_whole
        assert (first.verdict, first.copied_files) == (StagingVerdict.COPIED, len(CONTENT))
        assert first.copied_bytes == sum(map(len, CONTENT.values()))
        assert contents(node) == CONTENT
        assert model.stage(node) == NodeOutcome(StagingVerdict.KEPT, len(CONTENT))


@pytest.mark.parametrize("call", ["append", "sync_appended", "rename"])
@pytest.mark.parametrize("at", range(len(CONTENT)))
def test_a_copy_killed_anywhere_shows_whole_files_alone_and_the_next_goes_on(
    model: Model, call: str, at: int
) -> None:
    node = model.nodes[0]
    with pytest.raises(Killed):
        model.stage(node, FaultyDisk(call, at, Killed()))
    left = contents(node)
    assert len(left) == at
    assert left.items() <= CONTENT.items()
    assert "config.json" not in left
    assert list(node.rglob(".*.part"))

    outcome = model.stage(node)
    assert (outcome.kept_files, outcome.copied_files) == (at, len(CONTENT) - at)
    assert contents(node) == CONTENT
    assert not list(node.rglob(".*.part"))


def overwrite(path: Path) -> None:
    path.write_bytes(b"FIRST shard")


def shorten(path: Path) -> None:
    path.write_bytes(b"first")


def link(path: Path) -> None:
    original = path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(original)


@pytest.mark.parametrize("damage", [overwrite, shorten, link, Path.unlink])
def test_a_damaged_linked_or_missing_file_is_copied_again_and_no_other(
    model: Model, damage: Callable[[Path], None]
) -> None:
    node = model.nodes[0]
    model.stage(node)
    damage(node / "1.safetensors")
    outcome = model.stage(node)
    assert (outcome.verdict, outcome.copied_files) == (StagingVerdict.COPIED, 1)
    assert contents(node) == CONTENT
    assert not (node / "1.safetensors").is_symlink()


def test_a_node_without_room_copies_nothing_and_the_other_gets_the_model(model: Model) -> None:
    full, other = model.nodes
    outcome = model.stage(full, SmallDisk())
    assert outcome.verdict is StagingVerdict.NO_ROOM
    assert "has 100 bytes free" in outcome.problem
    assert contents(full) == {}
    assert model.stage(other).is_whole


def test_a_disk_that_is_full_in_the_middle_names_file_and_bytes_and_keeps_the_whole_ones(
    model: Model,
) -> None:
    node = model.nodes[0]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    outcome = model.stage(node, FaultyDisk("append", 1, full))
    assert (outcome.verdict, outcome.copied_files) == (StagingVerdict.FAILED, 1)
    assert "copying 2.safetensors, 0 of 12 bytes: [Errno 28] No space left" in outcome.problem
    assert contents(node) == {"1.safetensors": CONTENT["1.safetensors"]}
    assert not list(node.rglob(".*.part"))


class ChangedSource:
    """A source that is written to while it is read."""

    def chunks(self, file: ManifestFile) -> Iterator[bytes]:
        yield bytes(file.nbytes)


def test_a_file_with_another_digest_than_at_the_source_is_never_shown(model: Model) -> None:
    node = model.nodes[0]
    outcome = copy_model(model.manifest, ChangedSource(), node, ProgressMeter(), DISK)
    assert outcome.verdict is StagingVerdict.SOURCE_CHANGED
    assert "1.safetensors was read here as 11 bytes" in outcome.problem
    assert contents(node) == {}


def test_a_directory_with_files_of_another_model_is_left_as_it_is(model: Model) -> None:
    node = model.nodes[0]
    node.mkdir(parents=True)
    (node / "3.safetensors").write_bytes(b"of another model")
    outcome = model.stage(node)
    assert outcome.verdict is StagingVerdict.FOREIGN_FILES
    assert "not of this model: 3.safetensors" in outcome.problem
    assert contents(node) == {"3.safetensors": b"of another model"}


def test_a_directory_that_two_nodes_share_is_refused_to_the_second(model: Model) -> None:
    node = model.nodes[0]
    node.mkdir(parents=True)
    with (node / ".offbeat-stage.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        outcome = model.stage(node)
    assert outcome.verdict is StagingVerdict.IN_USE
    assert contents(node) == {}


def test_bytes_checked_and_bytes_copied_both_count_as_progress(model: Model) -> None:
    node, seen = model.nodes[0], DirectorySource(model.source)
    manifest, meter = model.manifest, ProgressMeter()
    copy_model(manifest, seen, node, meter, DISK)
    assert meter.now.total_bytes == manifest.nbytes
    copy_model(manifest, seen, node, meter, DISK)
    assert meter.now.total_bytes == 2 * manifest.nbytes
