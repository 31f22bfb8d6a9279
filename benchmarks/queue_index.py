"""The transfer queue's own speed, in one process: no payloads, no wire, no event loop.

    python -m benchmarks.queue_index [--quick] [--runs N]

An operation is the commit, the claim or the clear of a group of 16 rows; the bar is 200,000 a
second, however many groups rest. Two indexes: ``QueueCore``, the service's (two tags of 16 values
and six columns a group; the ack of each lease is paid for too, and not counted as an operation),
claimed one group at a time or 16; and ``QueueIndex``, the main job's, where a claim reads the
payload handles.

CPU time of the process; medians over the runs, lowest and highest beside them; all cases in turn
within a run. Python's garbage collector stays on; a full collection before each measurement keeps
one case's garbage out of the next one's figure.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.queue_service.core import ColumnSpec, QueueCore, QueueLimits, Schema
from offbeat.transfer_queue.index import QueueIndex

BAR = 200_000
ROWS = 16
COLUMNS = tuple(
    ColumnSpec(name, "float32", ragged=True)
    for name in ("prompt", "tokens", "mask", "logprobs", "versions", "rewards")
)
NAMES = tuple(column.name for column in COLUMNS)
TAGS = {"reward": tuple(map(float, range(ROWS))), "length": tuple(range(ROWS))}
ENDLESS = QueueLimits(max_rows=1 << 40, max_bytes=1 << 60)


@dataclass(frozen=True, slots=True)
class Measured:
    """CPU microseconds a group, by what was done."""

    commit: float
    claim: float
    clear: float  # the ack included, where there is one

    @property
    def operations_per_s(self) -> float:
        return 3e6 / (self.commit + self.claim + self.clear)


def core(depth: int, groups: int, at_once: int) -> Measured:
    """``depth`` groups rest while others come and go through leases of ``at_once`` groups."""
    queue = QueueCore(ENDLESS)
    queue.declare("train", Schema(COLUMNS))
    names = [f"g-{i:08d}" for i in range(depth + groups)]

    def put(name: str) -> None:
        queue.put("train", name, 1, ROWS, COLUMNS, 1 << 18, None, now=0.0, tags=TAGS)

    if queue.claim("train", "actor", 1, NAMES, now=0.0, lease_s=60.0) is not None:
        raise AssertionError("an empty queue lent a group")
    for name in names[:depth]:
        put(name)
    gc.collect()
    commit = claim = clear = 0.0
    clock = time.process_time
    for first in range(depth, depth + groups, at_once):
        start = clock()
        for name in names[first : first + at_once]:
            put(name)
        committed = clock()
        lease = queue.claim("train", "actor", at_once, NAMES, now=1.0, lease_s=60.0)
        claimed = clock()
        if lease is None:
            raise AssertionError("a queue with groups lent none")
        queue.ack(lease.id)
        queue.clear(lease.receipts)
        queue.freed()
        cleared = clock()
        commit += committed - start
        claim += claimed - committed
        clear += cleared - claimed
    if (rests := queue.stats(1.0).groups) != depth:
        raise AssertionError(f"{rests} groups rest, not {depth}")
    return _per_group(commit, claim, clear, groups)


def index(depth: int, groups: int, at_once: int) -> Measured:
    """The main job's index, ``at_once`` groups a round."""
    queue_index = QueueIndex()
    for prompt_index in range(depth):
        queue_index.put(prompt_index, 1, NAMES, 1 << 18, None)
    gc.collect()
    commit = claim = clear = 0.0
    clock = time.process_time
    for first in range(depth, depth + groups, at_once):
        new, oldest = range(first, first + at_once), range(first - depth, first - depth + at_once)
        start = clock()
        for prompt_index in new:
            queue_index.put(prompt_index, 1, NAMES, 1 << 18, None)
        committed = clock()
        for prompt_index in oldest:
            queue_index.payloads(prompt_index)
        claimed = clock()
        queue_index.clear(oldest)
        cleared = clock()
        commit += committed - start
        claim += claimed - committed
        clear += cleared - claimed
    if queue_index.bytes_held != depth << 18:
        raise AssertionError(
            f"{queue_index.bytes_held} bytes are held, not those of {depth} groups"
        )
    return _per_group(commit, claim, clear, groups)


def _per_group(commit: float, claim: float, clear: float, groups: int) -> Measured:
    return Measured(*(seconds / groups * 1e6 for seconds in (commit, claim, clear)))


CASES: dict[str, tuple[Callable[[int, int, int], Measured], int]] = {
    "QueueCore, 1 a claim": (core, 1),
    "QueueCore, 16 a claim": (core, 16),
    "QueueIndex": (index, 16),
}


def main() -> None:
    """Print a table, the ratios over depth, and whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer groups, three runs at most")
    options = parser.parse_args()
    runs, groups = (min(3, options.runs), 3_200) if options.quick else (options.runs, 32_000)
    depths = (100, 10_000, 100_000)
    taken: dict[tuple[str, int], list[Measured]] = {}
    for _ in range(runs):
        for name, (measure, at_once) in CASES.items():
            for depth in depths:
                taken.setdefault((name, depth), []).append(measure(depth, groups, at_once))
    print(f"{'':22s} {'depth':>8s} {'operations/s':>13s} {'(lowest, highest)':>20s}   "
          "us a group: commit  claim  clear")  # fmt: skip
    for name in CASES:
        rates = {depth: _line(name, depth, taken[name, depth]) for depth in depths}
        slowest = min(rates.values())
        verdict = "met" if slowest >= BAR else "MISSED"
        print(
            f"{'':22s} slowest depth over fastest {slowest / max(rates.values()):.2f}; "
            f"bar of {BAR:,} operations/s: {verdict}"
        )


def _line(name: str, depth: int, runs: list[Measured]) -> float:
    rates = [each.operations_per_s for each in runs]
    median = statistics.median(rates)
    costs = [
        statistics.median(values)
        for values in zip(*((each.commit, each.claim, each.clear) for each in runs), strict=True)
    ]
    print(
        f"{name:22s} {depth:8,} {median:13,.0f} ({min(rates):9,.0f}, {max(rates):9,.0f}) "
        f"{costs[0]:20.2f} {costs[1]:6.2f} {costs[2]:6.2f}"
    )
    return median


if __name__ == "__main__":
    main()
