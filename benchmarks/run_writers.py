"""The CPU of what a controller writes per step: journal with its aggregates, metrics, status.

    python -m benchmarks.run_writers

Steps of 16 groups of 8 samples on two engines, 60 metrics, two barriers per step. Process time
around the writers, threads included; making the events is not counted, writing them is. "To look
at" is what a run writes for its readers alone; the journal, fsyncs included, is what it needs to go
on, and has the aggregates in it. Fewer records than by default lie between two snapshots, so that snapshots are among what is measured.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.long_run import LongRun
from offbeat.controller.journal import open_journal
from offbeat.controller.run_stats import RunStats
from offbeat.run_files.disk import DISK, Disk
from offbeat.telemetry.hub import JsonlSink
from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.status_file import Status, StatusFile

METRICS = 60
SNAPSHOT_RECORDS = 5_000


class ForgetfulDisk(Disk):
    """Disk that writes, and makes nothing durable."""

    def sync_appended(self, file: int) -> None:
        del file


async def write_run(
    run_dir: Path, run: LongRun, *, barriers: int = 2, disk: Disk = DISK
) -> list[dict[str, float]]:
    """Return the milliseconds of CPU of each step by writer."""
    loop = asyncio.get_running_loop()
    ledger, journal = open_journal(
        run_dir / "journal",
        partial(loop.run_in_executor, None),
        snapshot_records=SNAPSHOT_RECORDS,
        disk=disk,
        unix_s=time.time,
    )
    ledger.open("writers-1", 1, "driver")
    sink, status = JsonlSink(run_dir / "metrics.jsonl"), StatusFile(run_dir, "writers-1")
    sink.open()
    metrics = {f"section/metric_{number}": number / 7 for number in range(METRICS)}
    fold, costs = RunStats(), list[dict[str, float]]()
    for step in range(1, run.steps + 1):
        events = list(run.step_events(step))
        for event in events:
            ledger.apply(event)  # pyright: ignore[reportArgumentType] - Event is the base of AnyEvent
        record = MetricRecord(step, step, time.time(), metrics)
        began = time.process_time()
        for event in events:
            journal.append(event)
        encoded = time.process_time()
        for _ in range(barriers):
            await journal.barrier()
            journal.append(events[-1])  # a second barrier waits for what was appended since
        journalled = time.process_time()
        sink.write(record)
        status.update(Status(step=step, steps=run.steps, phase="running"))
        written = time.process_time()
        for event in events:
            fold.add(event)
        if step % (SNAPSHOT_RECORDS // len(events)) == 0:
            fold.end_part()
        folded = time.process_time()
        costs.append(
            {
                "aggregates": (folded - written) * 1e3,
                "metrics and status": (written - journalled) * 1e3,
                "to look at": (folded - journalled) * 1e3,
                "journal, encoding": (encoded - began) * 1e3,
                "journal, barriers": (journalled - encoded) * 1e3,
                "whole journal": (journalled - began) * 1e3,
            }
        )
    sink.close()
    journal.close()
    return costs


def main() -> None:
    """Print mean and median of each writer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=16)
    given = parser.parse_args()
    for title, barriers, disk in (
        ("two barriers per step, as a run has them", 2, DISK),
        ("two barriers on a disk that makes nothing durable", 2, ForgetfulDisk()),
        ("one barrier per step", 1, DISK),
    ):
        with tempfile.TemporaryDirectory() as directory:
            run = LongRun(given.steps, given.groups, 2)
            written = write_run(Path(directory), run, barriers=barriers, disk=disk)
            costs = asyncio.run(written)[20:]
        print(title)
        for name in costs[0]:
            values = [each[name] for each in costs]
            mean, median = statistics.fmean(values), statistics.median(values)
            print(f"  {name:22s} mean {mean:.3f} ms, median {median:.3f} ms per step")


if __name__ == "__main__":
    main()
