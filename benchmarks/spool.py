"""Measures the cost of having finished groups outlive the controller.

    python -m benchmarks.spool [--rounds N] [--directory DIR]

Three sizes of group, each written in rounds of 16 as an environment worker does it, in turn with the
same bytes written as a file for each group. ``us`` is time of the clock and ``cpu`` that of the whole
process, a group; medians over the rounds.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.groups import Receipt
from offbeat.rollouts.spooling import Spooling
from offbeat.transfer_queue import schema
from offbeat.transfer_queue.codec import pack
from offbeat.transfer_queue.spool import SpoolWriter, read, sweep

GROUPS: Final = 16  # in a round
SIZES: Final = {"quickstart, 16 x 4 tokens": 4, "16 x 256 tokens": 256, "16 x 2048 tokens": 2048}
Columns = dict[str, NDArray[Any]]


def group(tokens: int) -> Columns:
    """The columns of 16 samples of so many tokens."""
    count, rng = 16 * tokens, np.random.default_rng(0)
    return {
        schema.PROMPT_IDS: np.arange(12, dtype=np.int32),
        schema.RESPONSE_IDS: rng.integers(0, 1000, count).astype(np.int32),
        schema.RESPONSE_OFFSETS: np.arange(0, count + 1, tokens, dtype=np.int64),
        schema.LOSS_MASK: np.ones(count, np.bool_),
        schema.GENERATION_LOGPROBS: rng.random(count).astype(np.float32),
        schema.WEIGHT_VERSIONS: np.zeros(count, np.int32),
        schema.REWARDS: rng.random(16).astype(np.float32),
    }


def receipt(columns: Columns) -> Receipt:
    """Return a receipt whose length does not matter here."""
    nbytes = schema.payload_bytes(columns)
    return Receipt(0, 1, "", "", (), (), (), (), (), (), tuple(columns), nbytes)


async def timed(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Microseconds a group of one round: of the clock, and of the processors."""
    cpu, clock = time.process_time(), time.perf_counter()
    await work()
    taken = time.perf_counter() - clock, time.process_time() - cpu
    return taken[0] * 1e6 / GROUPS, taken[1] * 1e6 / GROUPS


async def measure(name: str, tokens: int, rounds: int, directory: Path) -> None:
    """Measure both ways of writing groups of one size, and reading them back."""
    columns = group(tokens)
    spooling = Spooling(SpoolWriter(directory, "benchmark", str(tokens)))
    spooling.begin("run/1")
    answer = receipt(columns)
    answers = list[Receipt]()
    files = 0

    async def segments() -> None:
        answers[:] = await asyncio.gather(
            *(spooling.spool_group(answer, columns) for _ in range(GROUPS))
        )

    def write_files() -> None:
        nonlocal files
        for _ in range(GROUPS):
            files += 1
            (directory / f"{tokens}-{files}").write_bytes(pack(columns).data)

    async def a_file_each() -> None:
        await asyncio.get_running_loop().run_in_executor(None, write_files)

    ways = {"segments": segments, "a file each": a_file_each}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            times[way].append(await timed(work))
    await spooling.close()
    places = [each.spooled for each in answers if each.spooled is not None]
    reads = list[float]()
    for place in places:
        since = time.perf_counter()
        read(directory, place)
        reads.append((time.perf_counter() - since) * 1e6)
    print(
        f"{name}: {places[0].nbytes:,} bytes; read and verified in {statistics.median(reads):.0f} us"
    )
    for way, found in times.items():
        us, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"  {way:12} {us:6.0f} us {cpu:6.0f} us cpu")
    sweep(directory)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    asked = parser.parse_args()
    for name, tokens in SIZES.items():
        with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
            asyncio.run(measure(name, tokens, asked.rounds, Path(directory) / "spool"))


if __name__ == "__main__":
    main()
