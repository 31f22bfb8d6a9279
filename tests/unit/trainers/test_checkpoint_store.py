"""Checkpoints on disk: whatever fails, the old one or the new one is there, whole."""

import enum
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest
from faulty_disk import FaultyDisk
from saved_states import OWN, digest_of, latest_is_whole, names, save, state, store_on, whole
from structlog.testing import capture_logs

from offbeat.messages.failures import CheckpointFailed
from offbeat.run_files.disk import Disk
from offbeat.trainers.checkpoints.manifest import (
    MANIFEST,
    SCHEMA,
    check_identity,
    read_manifest,
)
from offbeat.trainers.errors import CheckpointMismatch

SAVE_OPERATIONS = 18  # of a save that replaces an older checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


# --- what a save leaves -------------------------------------------------------------------------------


def test_the_newest_two_are_kept_and_latest_names_the_newest(root: Path) -> None:
    for version in (10, 20, 30):
        save(root, version)
    assert names(root) == ["LATEST", "state_20", "state_30"]
    assert (root / "LATEST").read_text() == "state_30\n"
    assert sorted(path.name for path in (root / "state_30").iterdir()) == [
        "counters.json",
        "manifest.json",
        "weights",
    ]


def test_the_newest_that_is_not_too_new_is_found(root: Path) -> None:
    assert store_on(root).newest(5) is None
    for version in (10, 20):
        save(root, version)
    found = {at_most: whole(store_on(root).newest(at_most)) for at_most in (9, 10, 19, 20, 99)}
    assert found == {9: 0, 10: 10, 19: 10, 20: 20, 99: 20}


def test_other_directories_are_nobodys_business(root: Path) -> None:
    for stranger in ("step_7", "state_x", "state_"):
        (root / stranger).mkdir(parents=True)
    save(root, 10)
    save(root, 20)
    save(root, 30)
    assert {"step_7", "state_x", "state_"} < set(names(root))


def test_saving_again_what_is_there_writes_nothing(root: Path) -> None:
    nbytes = save(root, 10)
    before = (root / "state_10" / MANIFEST).stat().st_mtime_ns
    assert save(root, 10) == nbytes
    assert (root / "state_10" / MANIFEST).stat().st_mtime_ns == before


def test_a_damaged_checkpoint_in_the_way_of_a_save_is_set_aside_not_overwritten(root: Path) -> None:
    save(root, 10)
    save(root, 20)
    damaged = root / "state_20" / "weights"
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    save(root, 20)
    assert names(root) == ["LATEST", "corrupt_20", "state_10", "state_20"]
    assert whole(store_on(root).newest(20)) == 20
    assert (root / "corrupt_20" / "weights").read_bytes().startswith(b"xtate")


def test_a_disk_without_room_is_found_out_before_anything_is_written(root: Path) -> None:
    save(root, 10)
    disk = FaultyDisk()
    disk.free = 2**20
    with pytest.raises(CheckpointFailed, match=r"needs about 0\.0 MiB and 1\.0 MiB are free in /"):
        save(root, 20, disk=disk)
    assert names(root) == ["LATEST", "state_10"]
    assert disk.operations <= 2


def test_a_failed_save_says_rank_version_and_the_disks_own_words(root: Path) -> None:
    with pytest.raises(CheckpointFailed) as failed:
        save(root, 20, disk=FaultyDisk(fail_at=3, for_good=True))
    assert str(failed.value) == (
        "trainer rank 0 failed at its checkpoint of version 20: [Errno 28] No space left on device"
    )


# --- every operation of a save and of a rewind fails once -------------------------------------------


class Fault(enum.Enum):
    """What comes with the operation that fails."""

    ERROR = "it alone fails"
    DEATH = "the process dies there"
    POWER = "the power goes there: nothing that was not synced is left"
    POWER_IN_PART = "the power goes there: of what was not synced, only the oldest rename is lost"


FAULTS = pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())


def after_each_failure(root: Path, work: Callable[[Disk], object], fault: Fault) -> Iterator[int]:
    """Do ``work`` with its first, second, ... operation failing, each time from the same directory."""
    before = root.with_name("before")
    shutil.copytree(root, before)
    for fail_at in count(1):
        shutil.rmtree(root)
        shutil.copytree(before, root)
        disk, survived = FaultyDisk(fail_at=fail_at, for_good=fault is not Fault.ERROR), True
        try:
            work(disk)
        except CheckpointFailed:
            survived = False
        if fault in (Fault.POWER, Fault.POWER_IN_PART):
            disk.cut_the_power(undo=1 if fault is Fault.POWER_IN_PART else None)
        yield fail_at
        if survived and disk.operations < fail_at:
            return


@FAULTS
def test_wherever_a_save_fails_the_old_checkpoint_or_the_new_one_is_there_whole(
    root: Path, fault: Fault
) -> None:
    save(root, 10)
    save(root, 20)
    newest = list[int]()
    for _ in after_each_failure(root, lambda disk: save(root, 30, disk=disk), fault):
        newest.append(whole(store_on(root).newest(99)))
        assert latest_is_whole(root) in {20, 30}
        save(root, 40)
        assert latest_is_whole(root) == 40
        assert whole(store_on(root).newest(39)) in {20, 30}
        assert [name for name in names(root) if not name.startswith("state_")] == ["LATEST"]
        assert len(names(root)) == 3
    assert newest == sorted(newest)
    assert set(newest) == {20, 30}
    assert len(newest) == SAVE_OPERATIONS + 1  # the last time nothing failed


@FAULTS
def test_wherever_the_first_save_fails_there_is_none_or_a_whole_one(
    root: Path, fault: Fault
) -> None:
    root.mkdir()
    newest = set[int]()
    for _ in after_each_failure(root, lambda disk: save(root, 10, disk=disk), fault):
        newest.add(whole(store_on(root).newest(99)))
        assert latest_is_whole(root) in {0, 10}
        save(root, 10)
        assert names(root) == ["LATEST", "state_10"]
    assert newest == {0, 10}


@FAULTS
def test_a_rewind_that_failed_can_be_done_again_and_latest_is_whole_meanwhile(
    root: Path, fault: Fault
) -> None:
    save(root, 10)
    save(root, 20)
    latest = set[int]()
    for _ in after_each_failure(root, lambda disk: store_on(root, disk).rewind(15), fault):
        latest.add(latest_is_whole(root))
        assert whole(store_on(root).rewind(15)) == 10
        assert latest_is_whole(root) == 10
        assert whole(store_on(root).newest(99)) == 10
    assert latest == {10, 20}


def test_what_was_answered_survives_a_power_cut(root: Path) -> None:
    disk = FaultyDisk()
    save(root, 10, disk=disk)
    disk.cut_the_power()
    assert latest_is_whole(root) == 10
    for version in (20, 30):
        disk = FaultyDisk()
        save(root, version, disk=disk)
        disk.cut_the_power()
        assert latest_is_whole(root) == version
        assert len(names(root)) == 3
    disk = FaultyDisk()
    store_on(root, disk).rewind(25)
    disk.cut_the_power()
    assert latest_is_whole(root) == whole(store_on(root).newest(99)) == 20


# --- damage -------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_in_every_byte_of_every_file_of_a_checkpoint(root: Path) -> None:
    save(root, 10)
    save(root, 20)
    for file in sorted((root / "state_20").iterdir()):
        content = file.read_bytes()
        for place in range(len(content)):
            damaged = bytearray(content)
            damaged[place] ^= 1 << place % 8
            file.write_bytes(damaged)
            assert whole(store_on(root).newest(99)) == 10, (file.name, place)
        file.write_bytes(content)
    assert whole(store_on(root).newest(99)) == 20


@pytest.mark.parametrize("name", ["counters.json", "weights", MANIFEST])
def test_a_missing_or_short_file_is_found(root: Path, name: str) -> None:
    save(root, 10)
    save(root, 20)
    file = root / "state_20" / name
    file.write_bytes(file.read_bytes()[:-1])
    assert whole(store_on(root).newest(99)) == 10
    file.unlink()
    assert whole(store_on(root).newest(99)) == 10


def test_a_damaged_checkpoint_is_skipped_with_a_line_that_names_file_and_digests(
    root: Path,
) -> None:
    save(root, 10)
    save(root, 20)
    file = root / "state_20" / "weights"
    want, damaged = digest_of(file.read_bytes()), b"x" + file.read_bytes()[1:]
    file.write_bytes(damaged)
    with capture_logs() as logs:
        assert whole(store_on(root).newest(99)) == 10
    assert logs == [
        {
            "event": "checkpoint.corrupt",
            "log_level": "warning",
            "file": str(file),
            "problem": f"its xxh3-128 digest is {digest_of(damaged)}, not {want}",
        }
    ]
    assert file.read_bytes() == damaged


def test_a_damaged_latest_is_written_anew(root: Path) -> None:
    save(root, 10)
    (root / "LATEST").write_bytes(b"state_\xff")
    assert whole(store_on(root).newest(99)) == 10
    save(root, 20)
    assert latest_is_whole(root) == 20


def test_a_damaged_checkpoint_is_not_counted_among_those_kept(root: Path) -> None:
    save(root, 10)
    save(root, 20)
    (root / "state_20" / "weights").unlink()
    save(root, 30)
    assert names(root) == ["LATEST", "state_10", "state_20", "state_30"]


# --- lineages -----------------------------------------------------------------------------------------


def test_after_a_rewind_newer_checkpoints_are_never_found_again(root: Path) -> None:
    save(root, 10)
    save(root, 20)
    assert whole(store_on(root).rewind(15)) == 10
    assert names(root) == ["LATEST", "abandoned_20", "state_10"]
    assert whole(store_on(root).newest(25)) == 10
    save(root, 20, lineage=1)
    assert names(root) == ["LATEST", "state_10", "state_20"]
    found = store_on(root).newest(25)
    assert found is not None
    assert found.manifest.weights_digest == digest_of(state(20, lineage=1))


def test_a_rewind_sets_what_is_damaged_aside_and_nothing_removes_it(root: Path) -> None:
    for again in range(2):
        save(root, 10)
        save(root, 20, lineage=again)
        (root / "state_20" / "weights").unlink()
        assert whole(store_on(root).rewind(25)) == 10
    save(root, 20)
    save(root, 30)
    assert names(root) == ["LATEST", "corrupt_20", "corrupt_20.2", "state_20", "state_30"]


def test_a_rewind_to_the_initial_model_leaves_no_latest(root: Path) -> None:
    assert store_on(root).rewind(0) is None
    save(root, 10)
    assert store_on(root).rewind(0) is None
    assert names(root) == ["abandoned_10"]


# --- somebody else's ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"backend": "torch"},
            (
                "belongs to backend stub; this trainer has backend torch. "
                "Set trainer.backend to stub, or start a new run"
            ),
        ),
        (
            {"model": "Qwen3 of 99 weights", "fingerprint": "0" * 32},
            (
                "belongs to model a stub (ffffffff); this trainer has model Qwen3 of 99 weights (00000000). "
                "Set model.path, model.dtype, trainer.lora and trainer.freeze as when the run "
                "began, or start a new run"
            ),
        ),
    ],
)
def test_the_checkpoint_of_another_is_refused_with_the_difference_and_a_way_out(
    root: Path, other: dict[str, str], message: str
) -> None:
    save(root, 10)
    store = store_on(root, own=msgspec.structs.replace(OWN, **other))
    for call in (store.newest, store.rewind):
        with pytest.raises(CheckpointMismatch) as refused:
            call(99)
        assert str(refused.value) == f"{root / 'state_10'} {message}"
    assert names(root) == ["LATEST", "state_10"]


def test_weights_of_the_other_backend_are_what_a_new_run_may_begin_with(root: Path) -> None:
    save(root, 10)
    directory = root / "state_10"
    saved = read_manifest(directory)
    of = {name: msgspec.structs.replace(OWN, backend=name) for name in ("torch", "megatron")}
    saved = msgspec.structs.replace(saved, identity=of["torch"])
    check_identity(directory, saved, of["torch"])
    with pytest.raises(CheckpointMismatch) as refused:
        check_identity(directory, saved, of["megatron"])
    assert refused.value.fix == (
        "Set trainer.backend to torch, or start a new run with its weights: "
        f"model.weights={directory}"
    )


def test_a_checkpoint_of_another_schema_is_refused(root: Path) -> None:
    save(root, 10)
    file = root / "state_10" / MANIFEST
    manifest = msgspec.json.decode(file.read_bytes())["manifest"] | {"schema": SCHEMA + 1}
    content = msgspec.json.encode(manifest)
    envelope = {"digest": digest_of(content), "manifest": msgspec.Raw(content)}
    file.write_bytes(msgspec.json.encode(envelope))
    with pytest.raises(CheckpointMismatch, match="belongs to schema 3; this trainer has schema 2"):
        store_on(root).newest(99)
