"""Controller's side of the spool: what it can read, what it keeps on disk, and what it removes."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from structlog.testing import capture_logs

from offbeat.messages.groups import Receipt
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool import SpoolWriter
from offbeat.transfer_queue.spool_reader import Hold, SpoolReader
from tests.support.ledger_model import receipt as made


@dataclass
class Owned:
    """Columns that this process owns, and the reference that keeps their copy."""

    columns: Columns
    hold: Hold = field(repr=False)


class MemorySpool(SpoolReader[Owned]):
    """A spool whose payloads are the columns themselves: none is ever lost."""

    def make_payload(self, columns: Columns, hold: Hold) -> Owned:
        return Owned(columns, hold)

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        del payloads
        return set()


def columns(prompt_index: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"response_ids": np.arange(prompt_index, prompt_index + 5, dtype=np.int32)}


def spooled(directory: Path, prompt_index: int = 0) -> Receipt:
    place = SpoolWriter(directory, "environment-0", "1-a").write(columns(prompt_index))
    return msgspec.structs.replace(made(prompt_index, 1), spooled=place)


def test_a_group_of_a_former_controller_becomes_a_payload_that_keeps_its_copy(
    tmp_path: Path,
) -> None:
    old = spooled(tmp_path, 7)
    assert old.spooled is not None
    spool = MemorySpool(tmp_path, {old.spooled.segment})
    payload = spool.readable(old)
    assert payload is not None
    assert np.array_equal(np.asarray(payload.columns["response_ids"]), columns(7)["response_ids"])
    later = ("environment-0.1-a.000002.spool", "environment-0.1-a.000003.spool")
    for name in later:
        (tmp_path / name).touch()
        place = msgspec.structs.replace(old.spooled, segment=name)
        spool.hold(msgspec.structs.replace(old, spooled=place))
    assert spool.readable(old) is not None, "its payload exists"
    assert asyncio.run(spool.lost({7: (payload,)})) == set()
    spool.close(())
    assert not tmp_path.exists()


def test_a_new_controller_removes_at_once_what_the_journal_does_not_need(tmp_path: Path) -> None:
    receipt = spooled(tmp_path)
    assert receipt.spooled is not None
    MemorySpool(tmp_path, {receipt.spooled.segment})
    assert list(tmp_path.iterdir())
    MemorySpool(tmp_path)
    assert not tmp_path.exists()


def test_what_is_gone_is_told_by_name_and_not_readable(tmp_path: Path) -> None:
    receipt = spooled(tmp_path)
    spool = MemorySpool(tmp_path)
    with capture_logs() as told:
        assert spool.readable(receipt) is None
    assert [(line["event"], line["group"]) for line in told] == [("spool.unreadable", "g-000000")]


def test_a_receipt_without_a_copy_is_not_readable_and_no_news(tmp_path: Path) -> None:
    spool = MemorySpool(tmp_path)
    with capture_logs() as told:
        assert spool.readable(made(0, 1)) is None and spool.hold(made(0, 1)) is None
    assert told == []


def test_a_segment_goes_with_the_last_payload_in_it_once_its_producer_writes_another(
    tmp_path: Path,
) -> None:
    old = spooled(tmp_path)
    assert old.spooled is not None
    newer = msgspec.structs.replace(
        old, spooled=msgspec.structs.replace(old.spooled, segment="environment-0.1-a.000002.spool")
    )
    spool = MemorySpool(tmp_path, {old.spooled.segment})
    held = spool.hold(old)
    spool.hold(newer)
    del held
    spool.hold(newer)
    spool.close({old.spooled.segment})  # has removed before what was asked to be
    assert not tmp_path.exists()


def test_the_end_of_a_run_leaves_what_the_next_controller_needs(tmp_path: Path) -> None:
    receipt = spooled(tmp_path)
    assert receipt.spooled is not None
    spool = MemorySpool(tmp_path, {receipt.spooled.segment})
    spool.close({receipt.spooled.segment})
    assert [path.name for path in tmp_path.iterdir()] == [receipt.spooled.segment]


def test_a_spool_that_keeps_all_removes_no_segment_at_its_start_meanwhile_and_at_its_end(
    tmp_path: Path,
) -> None:
    writer = SpoolWriter(tmp_path, "environment-0", "1-a", segment_bytes=1)  # a segment a group
    receipts = [
        msgspec.structs.replace(made(each, 1), spooled=writer.write(columns(each)))
        for each in range(3)
    ]
    spool = MemorySpool(tmp_path, keeps_all=True)
    for receipt in receipts:
        spool.hold(receipt)  # nobody keeps the reference
    spool.close(())
    assert len(list(tmp_path.iterdir())) == 3
    assert all(MemorySpool(tmp_path, keeps_all=True).readable(each) for each in receipts)


def test_segments_whose_groups_were_all_cancelled_go_when_their_producer_writes_another(
    tmp_path: Path,
) -> None:
    """Their receipts were never read: nobody has named them."""
    writer = SpoolWriter(tmp_path, "environment-0", "7-a", segment_bytes=1)  # a segment a group
    needed = writer.write(columns(0))
    other = SpoolWriter(tmp_path, "environment-01", "7-a").write(columns(9))
    spool = MemorySpool(tmp_path, {needed.segment, other.segment})
    _cancelled, held, _cancelled, newest = (writer.write(columns(each)) for each in range(1, 5))
    holds = [
        spool.hold(msgspec.structs.replace(made(1, 1), spooled=place)) for place in (held, newest)
    ]
    spool.close({path.name for path in tmp_path.iterdir()})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {each.segment for each in (needed, other, held, newest)}
    assert None not in holds


def test_a_replaced_producers_segments_go_once_its_next_incarnation_is_heard_of(
    tmp_path: Path,
) -> None:
    def write(incarnation: str, prompt_index: int) -> Receipt:
        place = SpoolWriter(tmp_path, "environment-0", incarnation).write(columns(prompt_index))
        return msgspec.structs.replace(made(prompt_index, 1), spooled=place)

    spool = MemorySpool(tmp_path)
    first = write("7-a", 0)
    holds = [spool.hold(first)]
    (tmp_path / "environment-0.7-a.000002.spool").touch()  # cancelled, then the process died
    second = write("8-b", 1)
    (
        tmp_path / "environment-0.9-c.000001.spool"
    ).touch()  # an incarnation that has named nothing yet
    holds.append(spool.hold(second))
    spool.close({path.name for path in tmp_path.iterdir()})
    left = {path.name for path in tmp_path.iterdir()}
    assert "environment-0.7-a.000002.spool" not in left
    assert "environment-0.9-c.000001.spool" in left
    assert {each.spooled.segment for each in (first, second) if each.spooled} <= left
    assert None not in holds
