"""The controller as a whole needs no more memory after many steps than after a few."""

import asyncio
import gc
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.growth import journal_bytes, run, run_config
from benchmarks.noop_ports import StepClock
from offbeat.plugins.simulation.quiet_log import quiet_log

EARLY, LATE = 100, 600


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Captured log lines would count as growth."""
    with quiet_log():
        yield


def test_five_hundred_more_steps_leave_the_controller_as_large_as_it_was(tmp_path: Path) -> None:
    steps, blocks = 0, dict[int, int]()

    def note(_: Mapping[str, float]) -> None:
        nonlocal steps
        steps += 1
        if steps in (EARLY, LATE):
            gc.collect()
            blocks[steps] = sys.getallocatedblocks()

    asyncio.run(run(run_config(LATE, 1), tmp_path / "journal", StepClock(note), 1000))
    # Not zero: caches fill, and what other tests left in this process allocates a little, too.
    assert blocks[LATE] - blocks[EARLY] < (LATE - EARLY) * 9 // 10, "one object a step is too much"


def test_bytes_of_a_journal_count_its_snapshots_and_aggregates(tmp_path: Path) -> None:
    for name, nbytes in (("events", 5), ("snapshot", 3), ("aggregates", 2)):
        (tmp_path / f"{name}-000002.bin").write_bytes(b"x" * nbytes)
    assert journal_bytes(tmp_path) == (5, 5)
