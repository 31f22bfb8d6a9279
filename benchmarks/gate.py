"""Refuse a change that makes a core path slower than at a pinned commit.

    python -m benchmarks.gate [all]

The cases are in ``benchmarks/gate_cases.py``; ``all`` adds the engine and the trainer. The pinned
commit is unpacked to a temporary directory. One process per tree imports it, and both take turns.

If ``perf stat`` counts instructions here, each case runs once per tree. Otherwise the lowest of
seven CPU times counts, because other processes only ever add to a time. A case is too slow if its
ratio is over the limit in two whole runs; the second one uses new processes.
"""

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PIN: Final = "d0134cd6ae81017ab41403a38c089b1fa1cb439c"
"""Commit to compare with. It moves only with a reason in the commit message: a case measures
something else from now on, a feature may cost so much, or a gain is to be kept."""

LIMIT: Final = 1.15
"""Highest accepted cost of this tree, as a multiple of the pinned one's."""

ROUNDS: Final = 7
QUICK: Final = ("controller", "environment worker", "queue index", "simulator")
SLOW: Final = ("engine", "trainer")
_ROOT: Final = Path(__file__).parents[1]
_CASES: Final = Path(__file__).with_name("gate_cases.py")


class GateFailed(Exception):
    """A tree could not be measured."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one case per unit: instructions, or CPU seconds."""

    pinned: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.pinned


Run = Mapping[str, Costs]
"""One run of the gate: the costs of each case."""


def find_slow_cases(run: Run, limit: float = LIMIT) -> list[str]:
    """Return the cases whose ratio is over the limit."""
    return [name for name, costs in run.items() if costs.ratio > limit]


def find_failures(first: Run, second: Run, limit: float = LIMIT) -> list[str]:
    """Return the cases that are too slow in both runs."""
    again = find_slow_cases(second, limit)
    return [name for name in find_slow_cases(first, limit) if name in again]


def format_table(run: Run, limit: float = LIMIT) -> str:
    """Return a row per case: both costs and their ratio."""
    lines = [f"{'benchmark':20s} {'pinned':>12s} {'this tree':>12s} {'ratio':>6s}"]
    for name, costs in run.items():
        mark = "" if costs.ratio <= limit else f"  over {limit}"
        lines.append(f"{name:20s} {costs.pinned:12.4g} {costs.ours:12.4g} {costs.ratio:6.2f}{mark}")
    return "\n".join(lines)


# --- measuring -----------------------------------------------------------------------------------


class Side:
    """A process that has imported one tree and runs cases on request."""

    def __init__(self, tree: Path, command: Sequence[str] = ()) -> None:
        """Start it. ``command`` is a program that runs the interpreter, such as ``perf stat``."""
        self.tree = tree
        self._process = subprocess.Popen(
            [*command, sys.executable, "-P", str(_CASES)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, request: str) -> None:
        """Send a request without waiting for its reply."""
        if self._process.stdin is not None:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()

    def receive(self) -> tuple[float, int]:
        """Return the CPU seconds and the units of the oldest request.

        Raises:
            GateFailed: The process has ended.
        """
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise GateFailed(f"the benchmark process of {self.tree} has ended: see its error above")
        return read_reply(line)

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.communicate()


def read_reply(line: str) -> tuple[float, int]:
    """Return the CPU seconds and the units of a reply."""
    seconds, units = line.split()
    return float(seconds), int(units)


def has_instruction_counts() -> bool:
    """Return whether ``perf stat`` counts instructions on this machine."""
    try:
        command = ["perf", "stat", "-x,", "-e", "instructions:u", "--", "true"]
        counted = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return False
    return counted.returncode == 0 and counted.stderr.split(",")[0].isdigit()


def count_instructions(tree: Path, name: str, runs: int) -> tuple[int, int]:
    """Prepare a case and run it ``runs`` times; return the instructions of the process, and the units."""
    units = 0
    with tempfile.NamedTemporaryFile("r") as counts:
        perf = ("perf", "stat", "-x,", "-o", counts.name, "-e", "instructions:u", "--")
        side = Side(tree, perf)
        try:
            for request in ["prepare", *["run"] * runs]:
                side.send(f"{request} {name}")
                units += side.receive()[1]
        finally:
            side.close()
        rows = [line for line in counts.read().splitlines() if "instructions" in line]
    return int(rows[0].split(",")[0]), units


def count_per_unit(*, prepared: int, run: int, units: int) -> float:
    """Return the instructions per unit of a run, without those of a process that only prepares."""
    return (run - prepared) / units


def measure_instructions(pinned: Path, names: Sequence[str]) -> Run:
    """Return the instructions per unit of one run of each case, without those that prepare it."""

    def count(tree: Path, name: str) -> float:
        prepared, _ = count_instructions(tree, name, 0)
        run, units = count_instructions(tree, name, 1)
        return count_per_unit(prepared=prepared, run=run, units=units)

    return {name: Costs(count(pinned, name), count(_ROOT, name)) for name in names}


def measure_cpu_times(pinned: Path, names: Sequence[str]) -> Run:
    """Return the lowest of several CPU times of each case; the trees take turns."""
    sides = Side(pinned), Side(_ROOT)
    taken = {name: {side: list[float]() for side in sides} for name in names}
    try:
        for name in names:
            for side in sides:
                side.send(f"prepare {name}")
            for side in sides:
                side.receive()
        for turn in range(ROUNDS):
            for name in names:
                for side in sides if turn % 2 else reversed(sides):
                    side.send(f"run {name}")
                    seconds, units = side.receive()
                    taken[name][side].append(seconds / units)
    finally:
        for side in sides:
            side.close()
    return {name: Costs(*(min(taken[name][side]) for side in sides)) for name in names}


# --- the pinned tree -----------------------------------------------------------------------------


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, check=False)


@contextlib.contextmanager
def unpack_pinned() -> Generator[Path]:
    """Unpack the pinned commit to a directory that is removed after the block."""
    archive = _git("archive", PIN)
    if archive.returncode:
        raise GateFailed(f"commit {PIN} cannot be unpacked: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(directory, filter="data")
        yield Path(directory)


def main() -> int:
    """Print a table per run; return 1 if a case is too slow in both runs."""
    parser = argparse.ArgumentParser(
        description="Compare this tree's speed with a pinned commit's."
    )
    parser.add_argument("what", nargs="?", choices=["quick", "all"], default="quick")
    names = QUICK if parser.parse_args().what == "quick" else (*QUICK, *SLOW)
    if _git("cat-file", "-e", f"{PIN}^{{commit}}").returncode:
        print(f"bench-gate: SKIPPED, commit {PIN} is not in this clone (git fetch --unshallow)")
        return 0
    counted = has_instruction_counts()
    measure = measure_instructions if counted else measure_cpu_times
    with unpack_pinned() as pinned:
        first = measure(pinned, names)
        unit = "instructions" if counted else f"CPU seconds, lowest of {ROUNDS}"
        print(f"{unit} per unit; pinned: {PIN}\n{format_table(first)}", flush=True)
        if not find_slow_cases(first):
            return 0
        print("\nagain, because a ratio is over the limit:", flush=True)
        second = measure(pinned, names)
        print(format_table(second))
    failures = find_failures(first, second)
    if failures:
        print(f"\nslower than {LIMIT} times commit {PIN} in both runs: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
