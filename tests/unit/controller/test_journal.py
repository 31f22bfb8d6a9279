"""The journal's files as its readers find them; barriers and crashes have tests of their own."""

import asyncio
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.controller.events import (
    SCHEMA,
    Admitted,
    AnyEvent,
    Checkpointed,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    DropReason,
    EngineLost,
    Joined,
    Opened,
    Released,
    Retired,
    Returned,
    ReturnKind,
    RewardCallsMade,
    Rewound,
    Served,
    Spent,
    StepApplied,
    StepIntent,
    StepRefused,
    TrainerReplaced,
    Unclaimed,
    WorkerLost,
)
from offbeat.controller.journal import (
    FileJournal,
    JournalCorrupt,
    JournalRemoved,
    JournalTaken,
    JournalVersion,
    frames,
    open_journal,
    read_journal,
    recover,
)
from offbeat.controller.journal.frames import HEADER_BYTES, SEGMENT, frame, header
from offbeat.controller.journal.reading import fold
from offbeat.controller.ledger import Ledger
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.failures import Component
from offbeat.run_files.disk import Disk
from offbeat.run_files.limits import JOURNAL_FILE_BYTES, FileTooLarge

RECEIPT = make_receipt(0, 1, (((0, 1), (1, 1)),), rewards=(0.5,), payload_bytes=10)
EVERY_KIND: list[AnyEvent] = [
    Opened("run-1", 1),
    Joined(Component.ENGINE, "generator-0", "incarnation-1"),
    EngineLost("generator-1", "it was killed"),
    WorkerLost("environment-0", "it was killed"),
    Retired("generator-1", "it died at every start"),
    TrainerReplaced("killed", found=True),
    Spent({"compute": 1.5}, {"compute": 2.5}, 0.5, 0.25, 1),
    Served("generator-0", "incarnation-1", 1, 0, "digest"),
    Admitted(0, 1),
    Dispatched(0, 1, "generator-0", 0),
    Committed(RECEIPT),
    Claimed(1, 1, (0,)),
    Unclaimed(1, 1),
    Returned(0, 1, ReturnKind.EVICTED, "stale"),
    Dropped(0, DropReason.DATA, "reward_nan", 1),
    StepIntent(1, 1, ()),
    StepApplied(1, 1, 1, (), 1),
    StepRefused(2, 1, "gradient norm is nan"),
    Checkpointed(1, "digest"),
    Released(1, "digest"),
    RewardCallsMade("environment-0-1", 7),
    Rewound(1, 1, "a rank was lost"),
]


async def at_once(job: Callable[[], int]) -> int:
    return job()


def opened(directory: Path, snapshot_records: int = 1000) -> tuple[Ledger, FileJournal]:
    return open_journal(directory, at_once, snapshot_records=snapshot_records)


def written(directory: Path, events: list[AnyEvent]) -> Path:
    """An incarnation that appends these, and its only segment."""
    _, journal = opened(directory)
    for event in events:
        journal.append(event)
    assert journal.close()
    return max(directory.glob("events-*"))


def read_all(directory: Path) -> list[AnyEvent]:
    return list(read_journal(directory))


def frame_ends(data: bytes) -> list[int]:
    """Where a torn file would be whole: behind the header, behind each frame."""
    return [HEADER_BYTES, *(end for _, end in frames.frames("", data))]


# --- reading ------------------------------------------------------------------------------------


def test_every_kind_of_event_comes_back_equal_and_in_order(tmp_path: Path) -> None:
    assert {type(event) for event in EVERY_KIND} == set(get_args(AnyEvent))
    written(tmp_path / "runs" / "journal", EVERY_KIND)
    assert list(read_journal(tmp_path / "runs" / "journal")) == EVERY_KIND


def test_a_directory_without_segments_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path)) == []
    assert recover(tmp_path).counts() == Ledger().counts()


def test_a_cut_anywhere_leaves_the_frames_before_it(tmp_path: Path) -> None:
    file = written(tmp_path, EVERY_KIND)
    whole = file.read_bytes()
    ends = frame_ends(whole)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends[1:])
        assert list(read_journal(tmp_path)) == EVERY_KIND[:kept]


def test_zeros_and_rubbish_behind_the_last_frame_are_a_torn_tail(tmp_path: Path) -> None:
    file = written(tmp_path, EVERY_KIND)
    whole = file.read_bytes()
    for tail in (bytes(5000), b"\x07" * 30, frame(b"abc")[:-1], b"\xff\xff\xff\x00" * 9):
        file.write_bytes(whole + tail)
        assert list(read_journal(tmp_path)) == EVERY_KIND


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_a_torn_last_frame_or_told_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, where: float, bit: int
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    file = written(directory, EVERY_KIND)
    data = bytearray(file.read_bytes())
    ends = frame_ends(bytes(data))
    place = int(where * len(data))
    data[place] ^= 1 << bit
    file.write_bytes(data)
    if place >= ends[-2]:
        assert list(read_journal(directory)) == EVERY_KIND[:-1]
        return
    with pytest.raises((JournalCorrupt, JournalVersion)) as raised:
        list(read_journal(directory))
    assert raised.value.file == str(file)
    if isinstance(raised.value, JournalCorrupt):
        assert raised.value.offset == max((end for end in ends if end <= place), default=0)


@pytest.mark.parametrize("follows", [{1: 1}, {1: 2, 2: 1}, {1: 7}])
def test_segments_that_follow_each_other_in_a_circle_are_damage(
    tmp_path: Path, follows: dict[int, int]
) -> None:
    for number, former in follows.items():
        data = header(SEGMENT, former, HEADER_BYTES) + frame(b"\xc0")
        (tmp_path / f"events-{number:06d}.bin").write_bytes(data)
    for read in (recover, read_all):
        with pytest.raises(JournalCorrupt, match="which is not before it"):
            read(tmp_path)


def test_a_search_behind_a_bad_frame_is_bounded_and_what_it_cannot_search_is_damage() -> None:
    lengths = memoryview(b"\x10\x00\x00\x00" * 100)  # each names a frame that ends in the file
    many = "more bytes without a whole one than a crash can leave"
    assert frames.find_damage(lengths, 1) is None
    assert many in str(frames.find_damage(lengths, 1, summed_bytes=500))
    assert many in str(frames.find_damage(lengths, 1, searched_bytes=300))
    assert frames.find_damage(memoryview(bytes(400)), 1, searched_bytes=300) is None


def test_a_file_larger_than_any_journal_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, EVERY_KIND)
    os.truncate(file, JOURNAL_FILE_BYTES + 1)  # sparse
    for read in (recover, read_all):
        with pytest.raises(FileTooLarge, match="at most 1,073,741,824 are read"):
            read(tmp_path)


def test_a_whole_frame_that_is_no_event_is_damage(tmp_path: Path) -> None:
    (tmp_path / "events-000001.bin").write_bytes(header(SEGMENT) + frame(b"\xc0"))
    with pytest.raises(JournalCorrupt, match="no record"):
        list(read_journal(tmp_path))


@pytest.mark.parametrize(("schema", "advice"), [(SCHEMA - 1, "an older"), (SCHEMA + 1, "a newer")])
def test_another_schema_is_refused_with_both_versions_and_what_to_do(
    tmp_path: Path, schema: int, advice: str
) -> None:
    file = tmp_path / "events-000001.bin"
    fields = frames._HEADER.pack(SEGMENT, frames.FORMAT, schema, 0, 0)  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
    file.write_bytes(fields + frames.zlib.crc32(fields).to_bytes(4, "little"))
    with pytest.raises(JournalVersion, match=f"schema {schema}.* reads {SCHEMA}.*{advice}"):
        list(read_journal(tmp_path))
    with pytest.raises(JournalVersion):
        opened(tmp_path)
    assert list(tmp_path.glob("events-*")) == [file], (
        "a refused incarnation leaves no segment behind"
    )


def test_another_format_is_refused_whatever_its_header_looks_like(tmp_path: Path) -> None:
    data = SEGMENT + (frames.FORMAT + 1).to_bytes(4, "little") + b"?" * 99
    (tmp_path / "events-000001.bin").write_bytes(data)
    with pytest.raises(JournalVersion, match="format 2"):
        list(read_journal(tmp_path))


def test_a_file_that_is_no_segment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events-000001.bin").write_bytes(b"{}" * 99)
    with pytest.raises(JournalCorrupt, match="does not begin with the header"):
        list(read_journal(tmp_path))


# --- incarnations --------------------------------------------------------------------------------------


def test_a_new_incarnation_goes_on_from_the_state_and_in_its_own_segment(tmp_path: Path) -> None:
    ledger, journal = opened(tmp_path)
    ledger.open("run-1", 1)
    ledger.dispatch(ledger.admit(1), "generator-0", 0)
    journal.close()
    before = (tmp_path / "events-000001.bin").read_bytes()
    ledger, journal = opened(tmp_path)
    assert (ledger.run_id, ledger.incarnation, ledger.in_flight) == ("run-1", 1, 1)
    ledger.open("run-1", 2)
    ledger.commit(RECEIPT)
    journal.close()
    assert (tmp_path / "events-000001.bin").read_bytes() == before
    kinds = [type(event) for event in read_journal(tmp_path)]
    assert kinds == [Opened, Admitted, Dispatched, Opened, Committed]
    assert list(recover(tmp_path).ready) == [0]


def test_a_torn_tail_of_a_former_incarnation_is_followed_by_the_next_incarnation(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, EVERY_KIND[:3])
    file.write_bytes(file.read_bytes()[:-1])
    written(tmp_path, [Admitted(0, 5)])
    assert list(read_journal(tmp_path)) == [*EVERY_KIND[:2], Admitted(0, 5)]


def test_an_incarnation_that_wrote_nothing_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path, EVERY_KIND[:3])
    (tmp_path / "events-000002.bin").write_bytes(header(SEGMENT)[:-5])
    written(tmp_path, [Admitted(1, 5)])
    assert list(read_journal(tmp_path)) == [*EVERY_KIND[:3], Admitted(1, 5)]


def test_a_former_segment_that_was_cut_later_or_taken_away_is_told(tmp_path: Path) -> None:
    file = written(tmp_path, EVERY_KIND[:3])
    written(tmp_path, [Admitted(1, 5)])
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(JournalCorrupt, match=f"at byte {len(whole) - 1}: it ends here"):
        list(read_journal(tmp_path))
    file.unlink()
    with pytest.raises(JournalCorrupt, match="missing"):
        list(read_journal(tmp_path))


async def test_the_older_of_two_writers_is_refused_by_name_and_its_records_do_not_count(
    tmp_path: Path,
) -> None:
    old_ledger, old = opened(tmp_path)
    old_ledger.admit(1)
    await old.barrier()
    new_ledger, new = opened(tmp_path)
    old_ledger.admit(7)
    for _ in range(2):
        with pytest.raises(JournalTaken, match=r"events-000002\.bin"):
            await old.barrier()
    assert not old.close()
    new_ledger.admit(2)
    await new.barrier()
    new.close()
    assert list(read_journal(tmp_path)) == [Admitted(0, 1), Admitted(1, 2)]


async def test_a_journal_that_somebody_removes_fails_the_next_barrier(tmp_path: Path) -> None:
    ledger, journal = opened(tmp_path / "journal")
    ledger.admit(1)
    await journal.barrier()
    shutil.rmtree(tmp_path / "journal")
    ledger.admit(2)
    with pytest.raises(JournalRemoved, match=r"events-000001\.bin was removed during"):
        await journal.barrier()


def test_two_that_begin_at_the_same_moment_are_not_both_let_in(tmp_path: Path) -> None:
    class Rival(Disk):
        def create(self, path: Path) -> int:
            path.touch()
            return super().create(path)

    with pytest.raises(JournalTaken, match=r"events-000001\.bin"):
        open_journal(tmp_path, at_once, snapshot_records=9, disk=Rival())


# --- snapshots ----------------------------------------------------------------------------------


def snapshotted(directory: Path) -> Ledger:
    """Three segments with two snapshots between them; the ledger that they lead to."""

    async def scenario() -> Ledger:
        ledger, journal = opened(directory, snapshot_records=4)
        for number in range(5):
            ledger.dispatch(ledger.admit(1), "generator-0", number)
        await journal.barrier()
        journal.close()
        return ledger

    return asyncio.run(scenario())


def test_a_snapshot_stands_between_segments_and_recovery_begins_at_it(tmp_path: Path) -> None:
    ledger = snapshotted(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("aggregates-000002.bin", "aggregates-000003.bin"),
        *("events-000001.bin", "events-000002.bin", "events-000003.bin"),
        *("snapshot-000002.bin", "snapshot-000003.bin"),
    ]
    assert len(list(read_journal(tmp_path))) == 10
    (tmp_path / "events-000001.bin").unlink()
    (tmp_path / "events-000002.bin").unlink()
    assert recover(tmp_path).groups == ledger.groups


def test_a_snapshot_made_after_a_reader_listed_the_segments_is_left_alone(tmp_path: Path) -> None:
    snapshotted(tmp_path)
    folded = fold(tmp_path, before=2)
    assert (folded.segment, folded.records, folded.ledger.in_flight) == (1, 4, 2)


@pytest.mark.parametrize("spoil", ["newest", "both"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_spoiled_snapshot_is_replaced_by_more_events(
    tmp_path: Path, spoil: str, cut: bool
) -> None:
    ledger = snapshotted(tmp_path)
    for path in sorted(tmp_path.glob("snapshot-*"))[0 if spoil == "both" else 1 :]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data[: len(data) // 2] if cut else data)
    assert recover(tmp_path).groups == ledger.groups
    ledger, journal = opened(tmp_path)
    assert ledger.in_flight == 5
    journal.close()


def test_a_snapshot_that_the_disk_refuses_costs_only_the_snapshot(tmp_path: Path) -> None:
    class Full(Disk):
        def rename(self, old: Path, new: Path) -> None:
            raise OSError(errno.ENOSPC, "refused")

    async def scenario() -> Ledger:
        ledger, journal = open_journal(tmp_path, at_once, snapshot_records=4, disk=Full())
        for _ in range(9):
            ledger.admit(1)
            await journal.barrier()
        assert journal.close()
        return ledger

    ledger = asyncio.run(scenario())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"events-00000{number}.bin" for number in (1, 2, 3)
    ]
    assert recover(tmp_path).groups == ledger.groups


def test_incarnations_that_die_young_do_not_put_the_snapshot_off_for_ever(tmp_path: Path) -> None:
    async def short_incarnation() -> None:
        ledger, journal = opened(tmp_path, snapshot_records=6)
        for _ in range(2):
            ledger.admit(1)
        await journal.barrier()
        journal.close()

    for incarnation in range(1, 4):
        asyncio.run(short_incarnation())
        assert bool(list(tmp_path.glob("snapshot-*"))) == (incarnation == 3)
    assert len(recover(tmp_path).groups) == 6


def test_an_unfinished_snapshot_is_cleared_away_by_the_next_incarnation(tmp_path: Path) -> None:
    snapshotted(tmp_path)
    (tmp_path / "snapshot-000004.bin.tmp").write_bytes(b"half of")
    opened(tmp_path)[1].close()
    assert not list(tmp_path.glob("*.tmp"))


def test_the_page_of_the_journal_lists_every_record_with_all_its_fields() -> None:
    page = (Path(__file__).parents[3] / "docs" / "journal.md").read_text()
    listed = {
        match["kind"]: set(re.findall(r"`(\w+)`", match["fields"]))
        for match in re.finditer(
            r"^\| `(?P<kind>\w+)` \|[^|]*\|(?P<fields>.*)\|$", page, re.MULTILINE
        )
    }
    kinds = {kind.__name__: set(kind.__struct_fields__) - {"unix_s"} for kind in get_args(AnyEvent)}
    assert listed == kinds
