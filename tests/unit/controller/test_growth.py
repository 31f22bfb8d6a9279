"""A run may be as long as it likes: what the controller keeps of it does not grow.

``benchmarks/growth.py`` shows the same over a million steps.
"""

import asyncio
import gc
import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.controller.journal import (
    JournalCorrupt,
    JournalFailed,
    open_journal,
    read_journal,
    recover,
    recover_with_totals,
)
from offbeat.controller.journal.reading import fold, numbers, segment_path, snapshot_path
from offbeat.controller.ledger import Ledger
from offbeat.controller.run_stats import RunStats
from offbeat.testing.samplers import rewind
from tests.support.ledger_model import receipt, state_of

STEPS = 10_000
SNAPSHOT_RECORDS = 1000


async def at_once(work: Callable[[], int]) -> int:
    return work()


def step(ledger: Ledger) -> None:
    """One step of one group; no checkpoint is made, so a rewind may undo any of them."""
    prompt_index, version = ledger.admit(None), ledger.trainer_version
    attempt = ledger.dispatch(prompt_index, "generator-0", version)
    ledger.commit(receipt(prompt_index, attempt, version))
    ledger.claim([prompt_index], version + 1, 1)
    ledger.intend(version + 1, 1)
    ledger.applied(version + 1, 1)


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def interned(directory: Path) -> int:
    """Blocks of file names that Python 3.12, and no other, keeps: its pathlib interns them for ever."""
    return 4 * numbers(directory, "events")[-1] if sys.version_info[:2] == (3, 12) else 0


def sizes(directory: Path) -> tuple[int, int]:
    """Bytes of all segments and snapshots, and of the newest snapshot."""
    newest = snapshot_path(directory, numbers(directory, "snapshot")[-1])
    return sum(path.stat().st_size for path in directory.iterdir()), newest.stat().st_size


async def test_ten_thousand_steps_without_a_checkpoint_take_no_memory_and_linear_disk(
    tmp_path: Path,
) -> None:
    ledger, journal = open_journal(tmp_path, at_once, snapshot_records=SNAPSHOT_RECORDS)
    marks = list[tuple[int, int, int]]()
    for number in range(1, STEPS + 1):
        step(ledger)
        if number % 100 == 0:
            await journal.barrier()
        if number in (STEPS // 10, STEPS):
            marks.append((blocks(), *sizes(tmp_path)))
    assert journal.close()
    early, late = marks
    assert late[0] - early[0] < STEPS // 100 + interned(tmp_path), "blocks of memory"
    assert late[1] < 11 * early[1], "bytes on disk"
    assert late[2] < early[2] + 100, "bytes of a snapshot"
    folded = fold(tmp_path)
    assert folded.records <= SNAPSHOT_RECORDS, "what a new controller reads"
    assert state_of(folded.ledger) == state_of(ledger)


async def test_a_rewind_undoes_steps_whose_records_are_in_segments_long_closed(
    tmp_path: Path,
) -> None:
    ledger, journal = open_journal(tmp_path, at_once, snapshot_records=50)
    for _ in range(400):
        step(ledger)
    assert journal.close()
    ledger, journal = open_journal(tmp_path, at_once, snapshot_records=50)
    after = await journal.steps_after(7)
    assert rewind(ledger, 7, "rank_lost", after) == list(range(7, 400))
    assert (ledger.totals.trained, ledger.trainer_version) == (7, 7)
    assert ledger.steps.staleness == {-1: 7, 0: 7}
    assert len(ledger.steps.recent) == 7
    step(ledger)
    assert journal.close()
    assert state_of(recover(tmp_path)) == state_of(ledger)


async def test_a_rewind_reads_no_more_segments_than_it_has_to(tmp_path: Path) -> None:
    ledger, journal = open_journal(tmp_path, at_once, snapshot_records=50)
    for _ in range(400):
        step(ledger)
    await journal.barrier()
    first = segment_path(tmp_path, 1)
    first.write_bytes(first.read_bytes()[:-9])
    after = await journal.steps_after(390)
    assert [each.version for each in after.undone] == list(range(391, 401))
    assert len(after.rewards) == 20
    with pytest.raises(JournalCorrupt, match=first.name):
        await journal.steps_after(0)
    journal.close()


async def test_a_disk_that_does_not_give_the_steps_back_is_named(tmp_path: Path) -> None:
    _, journal = open_journal(tmp_path / "journal", at_once, snapshot_records=50)
    shutil.rmtree(tmp_path / "journal")
    with pytest.raises(JournalFailed, match="No such file"):
        await journal.steps_after(0)


@pytest.mark.parametrize("snapshot_records", [7, 100, 10**6])
def test_times_and_rates_of_the_incarnations_so_far_are_in_the_snapshot(
    tmp_path: Path, snapshot_records: int
) -> None:
    seconds = itertools.count(1000.0)

    async def one_incarnation(incarnation: int) -> None:
        ledger, journal = open_journal(
            tmp_path, at_once, snapshot_records=snapshot_records, unix_s=lambda: next(seconds)
        )
        ledger.open("run", incarnation, f"driver-{incarnation % 2}")
        for _ in range(50):
            step(ledger)
        assert journal.close()

    for incarnation in (1, 2, 3):
        asyncio.run(one_incarnation(incarnation))
    whole = RunStats.fold(read_journal(tmp_path)).totals
    assert recover_with_totals(tmp_path)[1] == whole
    assert (whole.samples, whole.resumes) == (300, 2)
