"""Checkpoints that somebody has moved, renamed, or written for the purpose."""

from pathlib import Path

import msgspec
import pytest
from saved_states import digest_of, latest_is_whole, names, save, store_on, whole
from structlog.testing import capture_logs

from offbeat.run_files.disk import Disk
from offbeat.trainers.checkpoints.manifest import MANIFEST


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_a_checkpoint_that_was_moved_elsewhere_and_linked_to_is_kept_and_left_like_any_other(
    root: Path, tmp_path: Path
) -> None:
    save(root, 10, disk=Disk())
    moved = (root / "state_10").rename(tmp_path / "large disk")
    (root / "state_10").symlink_to(moved)
    assert whole(store_on(root).newest(10)) == 10
    for version in (20, 30, 40):
        save(root, version, disk=Disk())
    assert names(root) == ["LATEST", "state_30", "state_40"]
    assert (moved / "weights").exists()


def test_a_checkpoint_under_the_name_of_another_version_is_not_taken_for_it(root: Path) -> None:
    save(root, 10)
    save(root, 30)
    (root / "state_30").rename(root / "state_20")
    assert whole(store_on(root).newest(25)) == 10
    assert whole(store_on(root).rewind(25)) == 10
    assert names(root) == ["LATEST", "corrupt_20", "state_10"]


@pytest.mark.parametrize(
    "change",
    [
        {"version": "10"},
        {"schema": None},
        {"files": [{"name": "../../secret", "nbytes": 4, "digest": digest_of(b"word")}]},
        {"files": [{"name": "..", "nbytes": 0, "digest": ""}]},
    ],
)
def test_a_manifest_made_for_the_purpose_is_a_damaged_one(
    root: Path, change: dict[str, object]
) -> None:
    save(root, 5)
    save(root, 10)
    (root.parent / "secret").write_text("word")
    file = root / "state_10" / MANIFEST
    told = msgspec.json.decode(file.read_bytes())["manifest"]
    content = msgspec.json.encode({**told, **change})
    envelope = {"digest": digest_of(content), "manifest": msgspec.Raw(content)}
    file.write_bytes(msgspec.json.encode(envelope))
    with capture_logs() as logs:
        assert whole(store_on(root).newest(10)) == 5
    assert logs[0]["event"] == "checkpoint.corrupt"


def test_a_latest_that_no_number_holds_is_a_damaged_one(root: Path) -> None:
    save(root, 10)
    (root / "LATEST").write_text(f"state_{'9' * 5000}")
    assert store_on(root).latest() is None
    save(root, 20)
    assert latest_is_whole(root) == 20
