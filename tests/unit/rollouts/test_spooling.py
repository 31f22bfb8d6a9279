"""Groups are on disk before they are answered, and a disk that refuses costs only the copy."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

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
        writes = (spool.spool_group(made(n, 1), columns(n)) for n in range(groups))
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
        refused = [await spool.spool_group(made(n, 1), columns(n)) for n in range(3)]
        (tmp_path / "spool").unlink()
        return [*refused, await spool.spool_group(made(3, 1), columns(3))]

    with capture_logs() as told:
        receipts = spooling(tmp_path / "spool", work)
    assert [receipt.spooled is None for receipt in receipts] == [True, True, True, False]
    assert [line["event"] for line in told] == ["spool.refused", "spool.works_again"]
    assert told[1]["groups_without"] == 3


def test_a_column_that_cannot_be_written_fails_its_rollout(tmp_path: Path) -> None:
    async def work(spool: Spooling) -> Receipt:
        return await spool.spool_group(made(0, 1), {"dates": np.array(["2020"], "datetime64[Y]")})

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
        without = [await spool.spool_group(made(n, 1), columns(n)) for n in range(2)]
        writer.freed.set()
        copied = without[0]
        while copied.spooled is None:  # the thread is not back yet
            await asyncio.sleep(0)
            copied = await spool.spool_group(made(2, 1), columns(2))
        await spool.close()
        return [*without, copied]

    with capture_logs() as told:
        receipts = asyncio.run(main())
    assert [receipt.spooled is None for receipt in receipts] == [True, True, False]
    assert (told[0]["event"], told[-1]["event"]) == ("spool.refused", "spool.works_again")


def test_a_cancelled_rollout_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async def work(spool: Spooling) -> Receipt:
        first = asyncio.ensure_future(spool.spool_group(made(0, 1), columns(0)))
        second = asyncio.ensure_future(spool.spool_group(made(1, 1), columns(1)))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert spooling(tmp_path, work).spooled is not None


def test_another_incarnation_of_the_controller_has_segments_of_its_own(tmp_path: Path) -> None:
    async def work(spool: Spooling) -> list[Receipt]:
        written = list[Receipt]()
        for prompt_index, incarnation in enumerate(("run/1", "run/1", "run/2")):
            spool.begin(incarnation)
            written.append(await spool.spool_group(made(prompt_index, 1), columns(prompt_index)))
        return written

    places = [receipt.spooled for receipt in spooling(tmp_path, work)]
    first, same, other = (place.segment for place in places if place is not None)
    assert first == same != other
