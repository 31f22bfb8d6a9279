"""The two runtimes in turn: start, CPU and memory of the same recipe on Ray and in one process.

    python -m benchmarks.runtimes [--rounds 3] [--steps 200] [--recipe FILE]

A row per run: seconds from the start of the command to the end of the first step, CPU and wall
seconds per step after it, and the highest sum of the memory (PSS) of all processes. The whole tree
of processes is read five times a second; its CPU time is counted in the processes' own clocks.
Medians over the rounds and their ratios follow.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

RUNTIMES: Final = ("ray", "local")
_LOOK_S: Final = 0.2
_MEMORY_EVERY: Final = 5  # looks; reading it costs milliseconds per process


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run."""

    first_step_s: float
    cpu_per_step_s: float
    wall_per_step_s: float
    peak_bytes: float

    def __str__(self) -> str:
        return (
            f"first step {self.first_step_s:6.2f} s   CPU a step {1e3 * self.cpu_per_step_s:6.1f} ms   "
            f"wall a step {1e3 * self.wall_per_step_s:6.1f} ms   peak {self.peak_bytes / 2**20:6.0f} MiB"
        )


@dataclass(slots=True)
class ProcessTree:
    """A command and the processes that it has started."""

    command: psutil.Process
    peak_bytes: float = 0.0
    _cpu_s: dict[tuple[int, float], float] = field(default_factory=dict[tuple[int, float], float])

    def look(self, *, with_memory: bool) -> float:
        """Return the CPU seconds of all processes so far."""
        total_bytes = 0
        for process in self._processes():
            try:
                times = process.cpu_times()
                self._cpu_s[process.pid, process.create_time()] = times.user + times.system
                if with_memory:
                    total_bytes += process.memory_full_info().pss
            except psutil.Error:
                continue  # it ended; its time is what was seen last
        self.peak_bytes = max(self.peak_bytes, total_bytes)
        return sum(self._cpu_s.values())

    def _processes(self) -> Sequence[psutil.Process]:
        try:
            return [self.command, *self.command.children(recursive=True)]
        except psutil.Error:
            return []


def measure(runtime: str, recipe: Path, steps: int, run_dir: Path) -> Figures:
    """Run the recipe once and return its figures."""
    overrides = [f"steps={steps}", f"runtime={runtime}", "wandb.mode=disabled"]
    command = [sys.executable, "-m", "offbeat", "train", str(recipe), *overrides]
    began_s, metrics = time.monotonic(), run_dir / "metrics.jsonl"
    run = subprocess.Popen([*command, "--run-dir", str(run_dir)], stdout=subprocess.DEVNULL)
    tree, looks = ProcessTree(psutil.Process(run.pid)), 0
    first: tuple[float, float, int] | None = None  # time, CPU seconds and steps at the first look
    last: tuple[float, float, int] | None = None
    while run.poll() is None:
        cpu_s = tree.look(with_memory=looks % _MEMORY_EVERY == 0)
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if done and (last is None or done > last[2]):
            last = time.monotonic(), cpu_s, done
            first = first or last
        looks += 1
        time.sleep(_LOOK_S)
    if run.returncode or first is None or last is None or last[2] == first[2]:
        raise SystemExit(f"runtime={runtime} ended with {run.returncode} after too few steps")
    after = last[2] - first[2]
    return Figures(
        first[0] - began_s,
        (last[1] - first[1]) / after,
        (last[0] - first[0]) / after,
        tree.peak_bytes,
    )


def main() -> None:
    """Measure both runtimes in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    arguments = parser.parse_args()
    rows: dict[str, list[Figures]] = {runtime: [] for runtime in RUNTIMES}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds):
            for runtime in RUNTIMES:
                run_dir = Path(scratch) / f"{runtime}-{number}"
                rows[runtime].append(measure(runtime, arguments.recipe, arguments.steps, run_dir))
                print(f"{runtime:6} {rows[runtime][-1]}", flush=True)
    for name in ("first_step_s", "cpu_per_step_s", "wall_per_step_s", "peak_bytes"):
        on_ray, local = (
            statistics.median(getattr(each, name) for each in rows[runtime]) for runtime in RUNTIMES
        )
        print(f"{name:16} ray {on_ray:12.4g}   local {local:12.4g}   ratio {local / on_ray:.2f}")


if __name__ == "__main__":
    main()
