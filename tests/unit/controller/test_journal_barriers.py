"""What the journal promises whoever waits for it, on disks that work and on others."""

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.controller.events import (
    Admitted,
    Checkpointed,
)
from offbeat.controller.journal import (
    FileJournal,
    JournalFailed,
    open_journal,
    read_journal,
    recover,
)
from offbeat.controller.journal.file_journal import FLUSH_BYTES
from offbeat.controller.ledger import Ledger
from offbeat.messages.failures import OffbeatError
from offbeat.run_files.disk import Disk


async def at_once(job: Callable[[], int]) -> int:
    return job()


class Threads:
    """A way off the loop whose jobs run when the test says so."""

    def __init__(self) -> None:
        self.jobs = list[tuple[Callable[[], int], asyncio.Future[int]]]()

    def __call__(self, job: Callable[[], int]) -> asyncio.Future[int]:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.jobs.append((job, ended))
        return ended

    def run_one(self) -> None:
        job, ended = self.jobs.pop(0)
        try:
            ended.set_result(job())
        except OffbeatError as error:
            ended.set_exception(error)


class FailingDisk(Disk):
    """A switch for each thing that a disk can refuse; counts its fsyncs."""

    def __init__(self) -> None:
        self.write_error = self.sync_error = self.create_error = 0
        self.syncs = 0

    def create(self, path: Path) -> int:
        if self.create_error:
            raise OSError(self.create_error, "refused", str(path))
        return super().create(path)

    def append(self, file: int, data: bytes) -> None:
        if self.write_error:
            super().append(file, data[: len(data) // 2])
            raise OSError(self.write_error, "refused")
        super().append(file, data)

    def sync_appended(self, file: int) -> None:
        self.syncs += 1
        if self.sync_error:
            raise OSError(self.sync_error, "refused")


def opened(directory: Path, snapshot_records: int = 1000) -> tuple[Ledger, FileJournal]:
    return open_journal(directory, at_once, snapshot_records=snapshot_records, disk=FailingDisk())


# --- barriers -----------------------------------------------------------------------------------


async def test_appending_costs_no_system_call_and_a_barrier_makes_it_durable(
    tmp_path: Path,
) -> None:
    _, journal = opened(tmp_path)
    for number in range(3):
        journal.append(Admitted(number, 1))
        assert len(list(read_journal(tmp_path))) == number
        await journal.barrier()
        assert len(list(read_journal(tmp_path))) == number + 1
    journal.close()


async def test_all_barriers_that_wait_share_one_sync_and_later_ones_the_next(
    tmp_path: Path,
) -> None:
    disk, threads = FailingDisk(), Threads()
    ledger, journal = open_journal(tmp_path, threads, snapshot_records=1000, disk=disk)
    await journal.barrier()
    assert not threads.jobs, "nothing to wait for"
    before = disk.syncs
    waits = list[asyncio.Task[None]]()
    for _ in range(5):
        ledger.admit(1)
        waits.append(asyncio.create_task(journal.barrier()))
    await asyncio.sleep(0)
    assert len(threads.jobs) == 1
    threads.run_one()
    ledger.admit(1)
    late = asyncio.create_task(journal.barrier())
    await asyncio.gather(*waits)
    assert not late.done()
    assert disk.syncs == before + 1
    assert len(threads.jobs) == 1
    threads.run_one()
    await late
    assert disk.syncs == before + 2
    journal.close()


async def test_a_sync_vouches_only_for_what_it_wrote(tmp_path: Path) -> None:
    threads = Threads()
    ledger, journal = open_journal(tmp_path, threads, snapshot_records=1000)
    ledger.admit(1)
    first = asyncio.create_task(journal.barrier())
    await asyncio.sleep(0)
    job, ended = threads.jobs.pop()
    written = job()
    ledger.admit(2)
    second = asyncio.create_task(journal.barrier())
    await asyncio.sleep(0)
    ended.set_result(written)
    await first
    assert not second.done()
    threads.run_one()
    await second
    journal.close()


async def test_a_cancelled_barrier_takes_nothing_from_the_others(tmp_path: Path) -> None:
    threads = Threads()
    ledger, journal = open_journal(tmp_path, threads, snapshot_records=1000)
    ledger.admit(1)
    first, second = (asyncio.create_task(journal.barrier()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    threads.run_one()
    await second
    assert first.cancelled()
    journal.close()


async def test_much_that_nobody_waits_for_is_written_all_the_same(tmp_path: Path) -> None:
    threads = Threads()
    _, journal = open_journal(tmp_path, threads, snapshot_records=10**9)
    event = Checkpointed(1, "x" * (FLUSH_BYTES // 4))
    for _ in range(3):
        journal.append(event)
    assert not threads.jobs
    for _ in range(6):
        journal.append(event)
    assert len(threads.jobs) == 1, "one at a time"
    threads.run_one()
    await asyncio.sleep(0)
    assert list(read_journal(tmp_path)) == [event] * 9
    assert len(threads.jobs) == 1, "enough came meanwhile for another"
    threads.run_one()
    await asyncio.sleep(0)
    assert not threads.jobs
    journal.close()


@pytest.mark.real_clock
async def test_in_a_real_thread_it_holds_as_well(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    ledger, journal = open_journal(
        tmp_path, lambda job: loop.run_in_executor(None, job), snapshot_records=50
    )

    async def client() -> None:
        for _ in range(20):
            ledger.admit(1)
            await journal.barrier()

    await asyncio.gather(*(client() for _ in range(10)))
    ledger.admit(1)
    assert journal.flush_now()
    assert journal.close()
    assert recover(tmp_path).counts() == ledger.counts()
    assert list(read_journal(tmp_path)) == [Admitted(n, 1) for n in range(201)]


# --- disks that refuse --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("what", ["write", "sync"])
async def test_after_one_refusal_no_barrier_succeeds_even_if_the_disk_recovers(
    tmp_path: Path, what: str, number: int
) -> None:
    disk = FailingDisk()
    ledger, journal = open_journal(tmp_path, at_once, snapshot_records=1000, disk=disk)
    ledger.admit(1)
    await journal.barrier()
    setattr(disk, f"{what}_error", number)
    ledger.admit(2)
    waits = [journal.barrier() for _ in range(3)]
    for answer in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(answer, JournalFailed)
        assert answer.file == str(tmp_path / "events-000001.bin")
        assert "refused" in str(answer)
    disk.write_error = disk.sync_error = 0
    ledger.admit(3)
    with pytest.raises(JournalFailed):
        await journal.barrier()
    assert not journal.flush_now()
    assert not journal.close()
    assert isinstance(journal.failure, JournalFailed)
    target_steps = [
        event.target_step for event in read_journal(tmp_path) if isinstance(event, Admitted)
    ]
    assert target_steps[:1] == [1] and 3 not in target_steps


async def test_a_refusal_that_no_barrier_waited_for_is_told_at_the_next(tmp_path: Path) -> None:
    disk, threads = FailingDisk(), Threads()
    _, journal = open_journal(tmp_path, threads, snapshot_records=10**9, disk=disk)
    disk.write_error = errno.ENOSPC
    journal.append(Checkpointed(1, "x" * FLUSH_BYTES))
    threads.run_one()
    await asyncio.sleep(0)
    with pytest.raises(JournalFailed):
        await journal.barrier()
    journal.append(Checkpointed(1, "x" * FLUSH_BYTES))
    journal.snapshot()
    assert not threads.jobs, "nothing is written any more"


async def test_a_way_off_the_loop_that_breaks_fails_the_barriers_too(tmp_path: Path) -> None:
    async def broken(job: Callable[[], int]) -> int:
        raise RuntimeError("no thread is left")

    ledger, journal = open_journal(tmp_path, broken, snapshot_records=1000)
    ledger.admit(1)
    with pytest.raises(JournalFailed, match="no thread is left"):
        await journal.barrier()


def test_a_journal_that_cannot_begin_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    disk = FailingDisk()
    for switch in ("create_error", "write_error", "sync_error"):
        setattr(disk, switch, errno.ENOSPC)
        with pytest.raises(JournalFailed, match="Free or repair the disk"):
            open_journal(tmp_path, at_once, snapshot_records=9, disk=disk)
        setattr(disk, switch, 0)
        assert not list(tmp_path.iterdir())


# --- the end ------------------------------------------------------------------------------------


async def test_the_end_writes_what_a_sync_in_a_thread_has_not_come_to_and_in_order(
    tmp_path: Path,
) -> None:
    threads = Threads()
    ledger, journal = open_journal(tmp_path, threads, snapshot_records=1000)
    ledger.admit(1)
    wait = asyncio.create_task(journal.barrier())
    await asyncio.sleep(0)
    ledger.admit(2)
    assert journal.flush_now()
    assert list(read_journal(tmp_path)) == [Admitted(0, 1), Admitted(1, 2)]
    await wait
    threads.run_one()
    assert journal.close()
    assert journal.close(), "closing twice is closing"
    assert list(read_journal(tmp_path)) == [Admitted(0, 1), Admitted(1, 2)]


@pytest.mark.real_clock
async def test_the_end_does_not_wait_for_a_thread_that_the_disk_holds(tmp_path: Path) -> None:
    class Hanging(FailingDisk):
        def __init__(self) -> None:
            super().__init__()
            self.reached, self.go_on = threading.Event(), threading.Event()
            self.go_on.set()

        def sync_appended(self, file: int) -> None:
            self.reached.set()
            assert self.go_on.wait(60)

    loop, disk = asyncio.get_running_loop(), Hanging()
    ledger, journal = open_journal(
        tmp_path, lambda job: loop.run_in_executor(None, job), snapshot_records=9, disk=disk
    )
    disk.reached.clear()
    disk.go_on.clear()
    ledger.admit(1)
    wait = asyncio.create_task(journal.barrier())
    await loop.run_in_executor(None, disk.reached.wait)
    assert not journal.flush_now(patience_s=0)
    assert not journal.close(patience_s=0)
    assert journal.failure is None
    disk.go_on.set()
    await wait
    assert journal.close()


async def test_what_is_appended_after_the_end_is_refused_at_the_barrier(tmp_path: Path) -> None:
    ledger, journal = opened(tmp_path)
    journal.close()
    await journal.barrier()
    ledger.admit(1)
    with pytest.raises(JournalFailed, match="closed"):
        await journal.barrier()
