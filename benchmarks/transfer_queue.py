"""offbeat's transfer queue beside PyPI TransferQueue and plain Ray references, in one Ray session.

    python -m benchmarks.transfer_queue [--sides offbeat,peer,refs] [--sections cycle,stream] [--rounds N]
                                        [--quick] [--json FILE]

Needs the peer's environment (benchmarks/transfer_queue_peer/README.md); ``make bench-queue`` makes it.
One producer process and one consumer process a side; a group is 16 samples x {input_ids i64[2048],
logprobs f32[2048], mask bool[2048], reward f32}. Sides take turns within each round of each section,
and medians of rounds are compared. ``memory`` runs once a side, first, on fresh heaps.
"""

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import ray

from benchmarks.queue_client import QueueClient
from benchmarks.queue_figures import Bar, Figures, table, verdicts
from benchmarks.queue_sections import BARS, MEASURES, SECTIONS, Pair, Sizes
from benchmarks.queue_sides import SIDES, Handle, entry

STORE_BYTES: Final = 2 * 2**30
LOGICAL_CPUS: Final = 16  # the peer's actors ask for one each


@dataclass(slots=True)
class _Running:
    """A side that is up."""

    handle: Handle
    pair: Pair


def memcpy_gb_per_s(megabytes: int = 64, copies: int = 20) -> float:
    """Return the machine's best rate: one thread, warm pages."""
    source = np.ones(megabytes * 2**20, dtype=np.uint8)
    target = np.zeros_like(source)
    seconds: list[float] = []
    for _ in range(copies):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return source.nbytes / 1e9 / sorted(seconds)[copies // 2]


def _start(side: str) -> _Running:
    handle = entry(side).start()
    client = ray.remote(QueueClient).options(num_cpus=0)
    producer, consumer = (client.remote(side, handle) for _ in range(2))
    pair = Pair(producer, consumer)
    for end in (producer, consumer):  # connections, imports and the first pages
        ray.get(end.prepare.remote(1, 8))
        ray.get(end.declare.remote("warm"))
        ray.get(end.cycle.remote("warm", 5, Sizes().names))
    return _Running(handle, pair)


def _measure(
    running: Mapping[str, _Running], sections: Sequence[str], sizes: Sizes, rounds: int
) -> Figures:
    figures = Figures()
    for name in sections:
        section: Callable[[Pair, Sizes, str], dict[str, float]] = SECTIONS[name]
        for number in range(1 if name == "memory" else rounds):
            for side, up in running.items():
                began = time.monotonic()
                found = section(up.pair, sizes, f"{name}_{number}")
                figures.add(side, found)
                shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
                took_s = time.monotonic() - began
                print(f"  {name} {number} {side} ({took_s:.1f} s): {shown}", flush=True)
    return figures


def _report(figures: Figures, sides: Sequence[str], bars: Sequence[Bar]) -> None:
    print("\n" + "\n".join(table(figures, MEASURES, sides)))
    print(f"memcpy of 64 MB, one thread, GB/s: {memcpy_gb_per_s():.1f}")
    if lines := verdicts(figures, bars):
        print("\n" + "\n".join(lines))


def main() -> None:
    """Print each round, then the table of medians and what became of the bars."""
    parser = argparse.ArgumentParser(description="Transfer queues side by side.")
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round: does it work")
    parser.add_argument("--json", type=Path, help="also write every round's figures here")
    arguments = parser.parse_args()
    sides, sections = arguments.sides.split(","), arguments.sections.split(",")
    sizes = Sizes.quick() if arguments.quick else Sizes()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        running = {side: _start(side) for side in sides}
        figures = _measure(running, sections, sizes, 1 if arguments.quick else arguments.rounds)
        for side, up in running.items():
            entry(side).stop(up.handle)
    finally:
        ray.shutdown()
    _report(figures, sides, BARS)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures.as_json(), indent=1))


if __name__ == "__main__":
    main()
