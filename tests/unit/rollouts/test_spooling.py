"""Groups are on disk before they are answered, and a disk that refuses costs only the copy."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from offbeat.actors.ray_spool import RaySpool
from offbeat.messages.failures import SchemaError
from offbeat.messages.groups import Receipt, Spooled
from offbeat.rollouts.spooling import Spooling
from offbeat.transfer_queue.codec import Columns as SpoolColumns
from offbeat.transfer_queue.spool import SpoolWriter, read
from tests.support.ledger_model import receipt as made

Columns = dict[str, np.ndarray[Any, Any]]


def columns(prompt_index: int) -> Columns:
    return {"response_ids": np.arange(prompt_index, prompt_index + 5, dtype=np.int32)}


def spooling(directory: Path, work: Callable[[Spooling], Awaitable[Any]]) -> Any:
    """What ``work`` returns, with a spool that is closed afterwards."""

    async def main() -> Any:
        spool = Spooling(SpoolWriter(directory, "environment-0", "1-a"))
        try:
            return await work(spool)
        finally:
            await spool.close()

    return asyncio.run(main())


def spooled(directory: Path, groups: int) -> list[Receipt]:
    async def work(spool: Spooling) -> list[Receipt]:
        writes = (spool.spooled(made(n, 1), columns(n)) for n in range(groups))
        return await asyncio.gather(*writes)

    return spooling(directory, work)


def test_a_group_can_be_read_by_its_receipt_once_it_is_answered(tmp_path: Path) -> None:
    for prompt_index, receipt in enumerate(spooled(tmp_path, 4)):
        assert receipt.prompt_index == prompt_index and receipt.spooled is not None
        found = read(tmp_path, receipt.spooled)
        ids = found["response_ids"]
        assert isinstance(ids, np.ndarray)
        assert np.array_equal(ids, columns(prompt_index)["response_ids"])


def test_a_disk_that_refuses_costs_the_copy_and_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("in the way")

    async def work(spool: Spooling) -> list[Receipt]:
        refused = [await spool.spooled(made(n, 1), columns(n)) for n in range(3)]
        (tmp_path / "spool").unlink()
        return [*refused, await spool.spooled(made(3, 1), columns(3))]

    with capture_logs() as told:
        receipts = spooling(tmp_path / "spool", work)
    assert [receipt.spooled is None for receipt in receipts] == [True, True, True, False]
    assert [line["event"] for line in told] == ["spool.refused", "spool.works_again"]
    assert told[1]["groups_without"] == 3


def test_a_column_that_cannot_be_written_fails_its_rollout(tmp_path: Path) -> None:
    async def work(spool: Spooling) -> Receipt:
        return await spool.spooled(made(0, 1), {"dates": np.array(["2020"], "datetime64[Y]")})

    with pytest.raises(SchemaError, match="dates"):
        spooling(tmp_path, work)


class HangingWriter(SpoolWriter):
    """A disk that does not answer until it is freed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "environment-0", "1-a")
        self.freed = threading.Event()

    def write(self, columns: SpoolColumns) -> Spooled:
        self.freed.wait()
        return super().write(columns)


def test_a_disk_that_hangs_holds_up_no_group_and_is_used_again_once_it_answers(
    tmp_path: Path,
) -> None:
    writer = HangingWriter(tmp_path)

    async def main() -> list[Receipt]:
        spool = Spooling(writer, patience_s=0.2)
        without = [await spool.spooled(made(n, 1), columns(n)) for n in range(2)]
        writer.freed.set()
        copied = without[0]
        while copied.spooled is None:  # the thread is not back yet
            await asyncio.sleep(0)
            copied = await spool.spooled(made(2, 1), columns(2))
        await spool.close()
        return [*without, copied]

    with capture_logs() as told:
        receipts = asyncio.run(main())
    assert [receipt.spooled is None for receipt in receipts] == [True, True, False]
    assert (told[0]["event"], told[-1]["event"]) == ("spool.refused", "spool.works_again")


def test_a_cancelled_rollout_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async def work(spool: Spooling) -> Receipt:
        first = asyncio.ensure_future(spool.spooled(made(0, 1), columns(0)))
        second = asyncio.ensure_future(spool.spooled(made(1, 1), columns(1)))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert spooling(tmp_path, work).spooled is not None


def test_another_incarnation_of_the_controller_has_segments_of_its_own(tmp_path: Path) -> None:
    async def work(spool: Spooling) -> list[Receipt]:
        written = list[Receipt]()
        for prompt_index, incarnation in enumerate(("run/1", "run/1", "run/2")):
            spool.begin(incarnation)
            written.append(await spool.spooled(made(prompt_index, 1), columns(prompt_index)))
        return written

    places = [receipt.spooled for receipt in spooling(tmp_path, work)]
    first, same, other = (place.segment for place in places if place is not None)
    assert first == same != other


# --- the controller's side ---------------------------------------------------------------------------


def test_a_new_controller_removes_at_once_what_the_journal_does_not_need(tmp_path: Path) -> None:
    (receipt,) = spooled(tmp_path, 1)
    assert receipt.spooled is not None
    RaySpool(tmp_path, {receipt.spooled.segment})
    assert list(tmp_path.iterdir())
    RaySpool(tmp_path)
    assert not tmp_path.exists()


def test_what_is_gone_is_told_by_name_and_not_readable(tmp_path: Path) -> None:
    (receipt,) = spooled(tmp_path, 1)
    spool = RaySpool(tmp_path)
    with capture_logs() as told:
        assert spool.readable(receipt) is None
    assert [(line["event"], line["group"]) for line in told] == [("spool.unreadable", "g-000000")]


def test_a_receipt_without_a_copy_is_not_readable_and_no_news(tmp_path: Path) -> None:
    spool = RaySpool(tmp_path)
    with capture_logs() as told:
        assert spool.readable(made(0, 1)) is None and spool.hold(made(0, 1)) is None
    assert told == []


def test_a_segment_goes_with_the_last_payload_in_it_once_its_producer_writes_another(
    tmp_path: Path,
) -> None:
    (old,) = spooled(tmp_path, 1)
    assert old.spooled is not None
    newer = msgspec.structs.replace(
        old, spooled=msgspec.structs.replace(old.spooled, segment="environment-0.1-a.000002.spool")
    )
    spool = RaySpool(tmp_path, {old.spooled.segment})
    held = spool.hold(old)
    spool.hold(newer)
    del held
    spool.hold(newer)
    spool.close({old.spooled.segment})  # has removed before what was asked to be
    assert not tmp_path.exists()


def test_the_end_of_a_run_leaves_what_the_next_controller_needs(tmp_path: Path) -> None:
    (receipt,) = spooled(tmp_path, 1)
    assert receipt.spooled is not None
    spool = RaySpool(tmp_path, {receipt.spooled.segment})
    spool.close({receipt.spooled.segment})
    assert [path.name for path in tmp_path.iterdir()] == [receipt.spooled.segment]


def test_segments_whose_groups_were_all_cancelled_go_when_their_producer_writes_another(
    tmp_path: Path,
) -> None:
    """Their receipts were never read: nobody has named them."""
    writer = SpoolWriter(tmp_path, "environment-0", "7-a", segment_bytes=1)  # a segment a group
    needed = writer.write(columns(0))
    other = SpoolWriter(tmp_path, "environment-01", "7-a").write(columns(9))
    spool = RaySpool(tmp_path, {needed.segment, other.segment})
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

    spool = RaySpool(tmp_path)
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
