"""The controller among real Ray actors: groups a second and whose CPU they cost.

    python -m benchmarks.controller_actors [--quick] [--engines 1,4,16] [--runs N]

The real command with stub engines (1 ms a group), a stub trainer that computes nothing, 64 groups of
8 samples a step, ``ready_first`` at staleness 1. Steps 21 to the last one count. ``cores`` is CPU
time over the time of the clock: what a process kind takes of the machine, over all its processes.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.stub_runs import run

GROUPS, SAMPLES, WARM = 64, 8, 20
CONTROLLER: Final = "ControllerActor"
_SETTINGS: Final = (
    f"groups_per_step={GROUPS}",
    f"samples_per_group={SAMPLES}",
    "sampler.max_staleness=1",
    "stub.median_rollout_s=0.001",
    "stub.tail_sigma=0",
    "stub.step_s=0",
    "stub.sync_s=0",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one run, without its first steps."""

    groups_per_s: float
    cores: dict[str, float]  # by kind of process

    @property
    def controller_us(self) -> float:
        """CPU time of the controller's process, a group."""
        return self.cores[CONTROLLER] / self.groups_per_s * 1e6


def measure(engines: int, steps: int) -> Measured:
    """Measure one run of the command."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = (*_SETTINGS, f"steps={steps}", f"generator.engines={engines}")
        done = run(Path(scratch), settings)
    first, last = done.between(WARM, steps)
    wall_s = last.at_s - first.at_s
    cores = {
        kind: (cpu_s - first.cpu_s.get(kind, 0.0)) / wall_s for kind, cpu_s in last.cpu_s.items()
    }
    trained = sum(first.at_s < step.time_s <= last.at_s for step in done.steps) * GROUPS
    return Measured(trained / wall_s, cores)


def _print(engines: int, runs: Sequence[Measured]) -> None:
    rates = [each.groups_per_s for each in runs]
    median = sorted(runs, key=lambda each: each.groups_per_s)[len(runs) // 2]
    cores = sorted(median.cores.items(), key=lambda item: -item[1])
    print(
        f"{engines:2d} engines: {statistics.median(rates):6,.0f} groups/s "
        f"({min(rates):,.0f} to {max(rates):,.0f}), controller "
        f"{median.cores[CONTROLLER]:.2f} cores, {median.controller_us:.0f} us a group"
    )
    everybody_us = sum(median.cores.values()) / median.groups_per_s * 1e6
    print(
        f"   all processes {everybody_us:.0f} us a group; cores: "
        + ", ".join(f"{kind} {share:.2f}" for kind, share in cores),
        flush=True,
    )


def main() -> None:
    """Print two lines for each number of engines: the rate, and where the cores went."""
    parser = argparse.ArgumentParser(description="The controller among real Ray actors.")
    parser.add_argument("--engines", default="1,4,16", help="comma-separated")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=int, default=3, help="of each; the median is printed")
    parser.add_argument("--quick", action="store_true", help="one short run: does it work")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.engines.split(",")]
    steps, runs = arguments.steps, arguments.runs
    if arguments.quick:
        counts, steps, runs = counts[:1], 100, 1
    print(f"{psutil.cpu_count()} cores, {runs} runs, load {os.getloadavg()[0]:.1f} at the start")
    rounds = [[measure(count, steps) for count in counts] for _ in range(runs)]
    for count, of_count in zip(counts, zip(*rounds, strict=True), strict=True):
        _print(count, of_count)


if __name__ == "__main__":
    main()
