"""The page of a very long run: time, memory and size, of a run directory that this script makes.

    python -m benchmarks.long_run --steps 1000000 --groups 10

A controller would take weeks to write it. So each part of the journal is the first one with other
numbers: aggregates and snapshots are all written, events only of the stretches that the page
reads. The other segments are a header over a hole, which reading them would report as damage.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from offbeat.controller.events import (
    Admitted,
    Claimed,
    Committed,
    Dispatched,
    Event,
    Opened,
    Released,
    Served,
    Spent,
    StepApplied,
    StepIntent,
)
from offbeat.controller.journal.frames import AGGREGATES, SEGMENT, SNAPSHOT, frame, header
from offbeat.controller.journal.reading import (
    SavedState,
    aggregates_path,
    segment_path,
    snapshot_path,
)
from offbeat.controller.ledger import Ledger
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import Aggregates
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.groups import Receipt
from offbeat.plugins.report.story import RECORDS
from offbeat.runs.run_journal import RunJournal
from offbeat.telemetry.records import MetricRecord, encode_line

BEGAN_UNIX_S = 1_790_000_000.0
STEP_S = 20.0
SAMPLES = 8
METRICS = 40
RECORDS_PER_PART = 20_000


@dataclass(frozen=True)
class LongRun:
    """Sizes of the run."""

    steps: int
    groups: int  # per step
    engines: int = 16

    @property
    def steps_per_part(self) -> int:
        return RECORDS_PER_PART // (3 * self.groups + self.engines + 5)

    @property
    def parts(self) -> int:
        return self.steps // self.steps_per_part

    def step_events(self, step: int) -> Iterator[Event]:
        """Yield the records of a step without times: drawn, sampled and trained one by one."""
        dice = random.Random(step)
        first = (step - 1) * self.groups
        indices = tuple(range(first, first + self.groups))
        for index in indices:
            engine = f"generator-{index % self.engines}"
            yield Admitted(index, None)
            yield Dispatched(index, 1, engine, step - 1)
            yield Committed(_receipt(index, engine, step - 1, dice))
        samples = self.groups * SAMPLES
        yield Claimed(step, step, indices)
        yield StepIntent(step, step, indices)
        yield StepApplied(
            step, step, step, indices, first + self.groups, (1,) * self.groups, samples=samples,
            tokens=samples * 900, reward=min(1.0, dice.gauss(0.5, 0.1)), staleness=((0, samples),),
        )  # fmt: skip
        yield Released(step, f"{step:032x}")
        for engine in range(self.engines):
            yield Served(f"generator-{engine}", f"{engine}", step, step, f"{step:032x}")
        shares = {"compute": 0.7 * STEP_S, "waiting_groups": 0.2 * STEP_S, "sync": 0.1 * STEP_S}
        engines = {name: seconds * self.engines for name, seconds in shares.items()}
        yield Spent(shares, engines, generate_s=5.0, reward_s=0.1, syncs=1)

    def events(self, part: int) -> Iterator[Event]:
        """Yield the records of a part, from 0, with their times."""
        if part == 0:
            yield Opened("long-1", 1, "driver", unix_s=BEGAN_UNIX_S)
        first = part * self.steps_per_part + 1
        for step in range(first, first + self.steps_per_part):
            records = list(self.step_events(step))
            for number, event in enumerate(records, start=1):
                at_s = (step - 1 + number / len(records)) * STEP_S
                yield replace(event, unix_s=BEGAN_UNIX_S + at_s)


def _receipt(index: int, engine: str, version: int, dice: random.Random) -> Receipt:
    lengths = tuple(dice.randrange(200, 2000) for _ in range(SAMPLES))
    return make_receipt(
        index,
        1,
        tuple(((version, length),) for length in lengths),
        engine=engine,
        engine_incarnation=engine,
        rewards=tuple(float(dice.random() < 0.5) for _ in range(SAMPLES)),
        prompt_tokens=(100,) * SAMPLES,
        payload_bytes=10_000,
        generate_s=dice.uniform(2.0, 12.0),
        reward_s=0.1,
    )


def make(run_dir: Path, run: LongRun) -> None:
    """Write the run directory."""
    journal = run_dir / "journal"
    journal.mkdir(parents=True)
    ledger, fold = Ledger(), RunStats()
    for event in run.events(0):
        ledger.apply(event)  # pyright: ignore[reportArgumentType] - Event is the base of AnyEvent
        fold.add(event)
    template = fold.end_part(1)
    saved = SavedState(ledger.snapshot(), fold.totals, fold.carried)
    for part in range(run.parts):
        segment = part + 1
        head = header(SEGMENT, part, _segment_bytes(journal, part) if part else 0)
        segment_path(journal, segment).write_bytes(head)
        _make_hole(segment_path(journal, segment), len(head))
        # Each names what its segment follows, as the segment itself does.
        follows = segment, _segment_bytes(journal, segment)
        aggregates, state = _shifted(template, run, part), _shifted_state(saved, run, part)
        _write(aggregates_path(journal, segment + 1), header(AGGREGATES, *follows), aggregates)
        _write(snapshot_path(journal, segment + 1), header(SNAPSHOT, *follows), state)
    last = run.parts + 1
    segment_path(journal, last).write_bytes(
        header(SEGMENT, last - 1, _segment_bytes(journal, last - 1))
    )
    stretches = RunJournal(run_dir).stretches(RECORDS)
    for part in (part for stretch in stretches for part in stretch if part < run.parts):
        _fill(journal, run, part)
    _write_metrics(run_dir / "metrics.jsonl", run)
    (run_dir / "config.yaml").write_text(
        f"name: long\nsteps: {run.steps}\nsampler: {{max_staleness: 1}}\n"
    )


_HOLE_BYTES = 16 * 2**20


def _segment_bytes(journal: Path, number: int) -> int:
    return segment_path(journal, number).stat().st_size


def _make_hole(path: Path, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(nbytes + _HOLE_BYTES)


def _fill(journal: Path, run: LongRun, part: int) -> None:
    """Write the events of a part at the end of its segment, which keeps its size."""
    frames = b"".join(frame(msgspec.msgpack.encode(event)) for event in run.events(part))
    path = segment_path(journal, part + 1)
    size = path.stat().st_size
    head = path.read_bytes()[: size - _HOLE_BYTES]
    padding = _padding(size - len(head) - len(frames))
    path.write_bytes(head + frames + padding)


def _padding(nbytes: int) -> bytes:
    """Return one record of exactly so many bytes with its frame: a release with a long digest."""
    empty = len(frame(msgspec.msgpack.encode(Released(0, "x" * 2**16))))
    return frame(msgspec.msgpack.encode(Released(0, "x" * (2**16 + nbytes - empty))))


def _write(path: Path, head: bytes, content: object) -> None:
    path.write_bytes(head + frame(msgspec.msgpack.encode(content)))


def _shifted(template: Aggregates, run: LongRun, part: int) -> Aggregates:
    import numpy as np  # noqa: PLC0415 - the only use

    later_s, steps = part * run.steps_per_part * STEP_S, part * run.steps_per_part
    rows = np.frombuffer(template.steps, "<f8").reshape(run.steps_per_part, -1).copy()
    rows[:, 0] += steps
    rows[:, 1] += later_s
    rows[:, 2] += np.random.default_rng(part).normal(0, 0.02, len(rows)) + 0.4 * part / run.parts
    return replace(
        template,
        first_segment=part + 1,
        began_unix_s=template.began_unix_s + later_s,
        ended_unix_s=template.ended_unix_s + later_s,
        lowest_group=template.lowest_group + steps * run.groups,
        highest_group=template.highest_group + steps * run.groups,
        steps=rows.tobytes(),
        rare=template.rare if part == 0 else (),
        records=template.records + 1,
    )


def _shifted_state(saved: SavedState, run: LongRun, part: int) -> SavedState:
    times, steps = part + 1, (part + 1) * run.steps_per_part
    totals = saved.table.totals
    table = replace(
        saved.table,
        trainer_version=steps,
        totals=replace(
            totals,
            drawn=totals.drawn * times,
            trained=totals.trained * times,
            arrivals=totals.arrivals * times,
        ),
        steps=replace(
            saved.table.steps,
            samples={age: count * times for age, count in saved.table.steps.samples.items()},
        ),
    )
    later_s = part * run.steps_per_part * STEP_S
    history = replace(saved.history, at_s=saved.history.at_s + later_s)
    carried = replace(saved.aggregates, version=steps, at_s=saved.aggregates.at_s + later_s)
    return SavedState(table, history, carried)


def _write_metrics(path: Path, run: LongRun) -> None:
    names = [f"part{number % 6}/metric_{number}" for number in range(METRICS)]
    dice = random.Random(0)
    line = encode_line(
        MetricRecord(111, 111, BEGAN_UNIX_S, {name: dice.random() for name in names})
    )
    with path.open("wb") as file:
        for step in range(1, run.steps + 1):
            file.write(line.replace(b"111,", b"%d," % step, 2))


REPORT = """
import resource, sys, time
from pathlib import Path
from offbeat.plugins.report.document import write_report
wall, cpu = time.perf_counter(), time.process_time()
written = write_report([Path(sys.argv[1])], Path(sys.argv[2]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} s of CPU), "
      f"{written.nbytes / 1e6:.2f} MB, at most {peak:,.0f} MiB of memory")
"""


def main() -> None:
    """Make the run, and its page in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run_dir, output = Path(directory) / "run", Path(directory) / "report.html"
        began = time.perf_counter()
        make(run_dir, LongRun(given.steps, given.groups))
        print(f"run directory made in {time.perf_counter() - began:.0f} s")
        for _ in range(given.rounds):
            subprocess.run([sys.executable, "-c", REPORT, str(run_dir), str(output)], check=True)


if __name__ == "__main__":
    main()
