"""Measures packing and unpacking, beside a plain copy of the same bytes.

    python -m benchmarks.transfer_queue_codec [--quick] [--runs N]

Three tables: one group of 16 samples of 2048 tokens in four columns, a call each; large payloads in
GB/s, and as a part of the speed of a copy; the same bytes in 1 to 32 columns. Medians; what is
compared runs in turn, into memory that was touched before, except ``pack``, which makes its own.
``block`` is what the queue's clients do: to a place of its own, without a digest.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from offbeat.queue_service.storage.blocks import Blocks
from offbeat.transfer_queue.codec import (
    Column,
    Ragged,
    pack,
    pack_into,
    packed_size,
    unpack,
)

SAMPLES = 16
Calls = Mapping[str, Callable[[], Any]]


def group(tokens: int) -> dict[str, Column]:
    """A rollout's columns: 13 bytes a token and 4 a sample."""
    rng = np.random.default_rng(0)
    offsets = np.arange(SAMPLES + 1, dtype=np.int64) * tokens
    count = SAMPLES * tokens
    return {
        "input_ids": Ragged(rng.integers(0, 99_999, count), offsets),
        "logprobs": Ragged(rng.random(count, dtype=np.float32), offsets),
        "loss_mask": Ragged(rng.random(count, dtype=np.float32) < 0.5, offsets),
        "rewards": rng.random(SAMPLES, dtype=np.float32),
    }


def split(nbytes: int, columns: int) -> dict[str, Column]:
    """``nbytes`` of float32 in ragged columns of the same lengths."""
    rng = np.random.default_rng(0)
    count = nbytes // 4 // columns
    offsets = np.linspace(0, count, SAMPLES + 1).astype(np.int64)
    values = [rng.random(count, dtype=np.float32) for _ in range(columns)]
    return {f"column_{index}": Ragged(each, offsets) for index, each in enumerate(values)}


def medians_us(calls: Calls, runs: int) -> dict[str, float]:
    """Each call's median, all called in turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(runs):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) * 1e6 for name, times in taken.items()}


def calls_on(columns: Mapping[str, Column]) -> Calls:
    """Return all operations of the codec on the columns, and a copy of the packed bytes."""
    buffer, target = pack(columns), np.zeros(packed_size(columns), np.uint8)
    blocks = Blocks()
    shape = blocks.of(columns).shape
    block = np.zeros(shape.nbytes, np.uint8)
    return {
        "copy": lambda: np.copyto(target, buffer),
        "pack_into": lambda: pack_into(target, columns),
        "pack": lambda: pack(columns),
        "unpack": lambda: unpack(buffer),
        "unpack, not verified": lambda: unpack(buffer, verify=False),
        "block, written": lambda: blocks.of(columns).write(block),
        "block, read": lambda: blocks.columns_in(shape.header, block),
    }


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    parser.add_argument("--runs", type=int, default=500, help="calls of each kind (default: 500)")
    asked = parser.parse_args()
    runs = max(5, asked.runs // 10 if asked.quick else asked.runs)

    columns = group(2048)
    print(f"one group, {packed_size(columns):,} bytes in 4 columns: us a call")
    for name, took in medians_us(calls_on(columns), runs).items():
        print(f"  {name:22}{took:10.1f}")

    for nbytes in (2**20, 2**26):
        few = max(5, min(runs, 30 * 2**26 // nbytes))
        took = medians_us(calls_on(split(nbytes, 4)), few)
        print(f"{nbytes / 2**20:.0f} MiB in 4 columns: GB/s, and times the copy's time")
        for name, each in took.items():
            print(f"  {name:22}{nbytes / each / 1e3:10.1f}{each / took['copy']:10.2f}")

    for nbytes in (packed_size(columns), 2**26):
        few = max(5, min(runs, 30 * 2**26 // nbytes))
        print(f"{nbytes:,} bytes in 1, 4, 8, 32 columns: us a call, and times that of one column")
        by_count = {count: calls_on(split(nbytes, count)) for count in (1, 4, 8, 32)}
        for name in by_count[1]:
            took = medians_us({str(count): by_count[count][name] for count in by_count}, few)
            cells = "".join(f"{each:10.1f} {each / took['1']:5.2f}" for each in took.values())
            print(f"  {name:22}{cells}")


if __name__ == "__main__":
    main()
