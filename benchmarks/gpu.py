"""Runs the tests of a CUDA machine, part by part, and writes what they measured.

    python -m benchmarks.gpu [--parts abcdefg] [--seconds 360] [--out runs/gpu]

The parts run in the order of their value, each in a process of its own, so that none stops another.
After each, ``figures.md`` has the table up to there, and ``log.txt`` what the tests printed. Part c
also leaves ``curve.jsonl``, the metrics of its run, drawn as ``curve.png`` if matplotlib is installed.

Without a CUDA device it says so and ends with 0: nothing failed, and nothing was shown.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import torch

from benchmarks.gpu_curve import draw_curve
from benchmarks.gpu_figures import Machine, Outcome, read, table

ROOT = Path(__file__).parents[1]
NO_CUDA = "no CUDA device is visible to torch {version}: nothing was run, and nothing was shown"
LEAST_S: Final = 5.0  # a part is not started with less than this left


class Part(NamedTuple):
    """Tests that run in one process."""

    letter: str
    what: str
    files: tuple[str, ...]  # in tests/gpu
    limit_s: float


PARTS: Final = (
    Part(
        "a",
        "numbers against float64 on the CPU; digests",
        ("test_gpu_numbers.py", "test_gpu_weights.py"),
        80,
    ),
    Part("b", "a step of megatron-core on one rank", ("test_gpu_megatron.py",), 60),
    Part("c", "the quickstart to a reward of 0.9", ("test_gpu_quickstart.py",), 180),
    Part("d", "speed and memory of real sizes", ("test_gpu_speed.py",), 150),
    Part("e", "copies, hashes, CUDA-IPC", ("test_gpu_copies.py", "test_gpu_wires.py"), 60),
    Part("f", "kill -9 and resume", ("test_gpu_resume.py",), 60),
    Part("g", "NCCL with one rank", ("test_gpu_nccl.py",), 60),
    Part("h", "runs on Ray", ("test_gpu_ray.py",), 600),
)
DEFAULT: Final = "abcdefg"
"""Without Ray, within six minutes."""

Run = Callable[[Sequence[str], float, Path], str]
"""Runs a command for so many seconds at most and returns what went wrong; empty: nothing."""


def this_machine(device: str) -> Machine | None:
    """Return the machine of a torch device, or None if there is no such device."""
    if device == "cpu":
        return Machine("cpu", 1, torch.__version__, "")
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return Machine(name, torch.cuda.device_count(), torch.__version__, str(torch.version.cuda))


def run_tests(command: Sequence[str], limit_s: float, log: Path) -> str:
    """Run a command in the root of the repository and append its output to a file.

    Returns:
        What went wrong: the last line of the tests, or that they took too long, in which case every
        process that the command started is killed.
    """
    with log.open("ab") as output:
        began = output.tell()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
            process.wait()
            return f"not ended after {limit_s:.0f} s"
    if code == 0:
        return ""
    with log.open("rb") as written:
        written.seek(began)
        lines = written.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"


def measure(
    out: Path,
    machine: Machine | None,
    options: Sequence[str],
    *,
    letters: str = DEFAULT,
    seconds: float = 360.0,
    run: Run = run_tests,
    say: Callable[[str], None] = print,
) -> int:
    """Run the parts and write the table after each; return 1 if one failed, else 0.

    Args:
        out: Directory of the results, which are written anew.
        machine: The machine; None: it has no CUDA device, and no test is run.
        options: Further options of pytest.
        letters: The parts to run.
        seconds: Time for all of them; a part that has none left is not run.
        run: Runs the tests of a part.
        say: Prints a line.
    """
    if machine is None:
        say(NO_CUDA.format(version=torch.__version__))
        return 0
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    lines, log, curve = out / "figures.jsonl", out / "log.txt", out / "curve.jsonl"
    for path in (lines, log, curve):
        path.unlink(missing_ok=True)
    outcomes, ends_at = list[Outcome](), time.monotonic() + seconds
    for part in PARTS:
        if part.letter not in letters:
            continue
        began = time.monotonic()
        limit_s = min(part.limit_s, ends_at - began)
        if limit_s < LEAST_S:
            problem = "not run: no time was left"
        else:
            say(f"part {part.letter}: {part.what}, {limit_s:.0f} s at most")
            command = [
                sys.executable,
                "-m",
                "pytest",
                *(f"tests/gpu/{name}" for name in part.files),
            ]
            command += ["--figures", str(lines), "--curve", str(curve), *options]
            problem = run(command, limit_s, log)
        outcomes.append(Outcome(part.letter, part.what, problem, time.monotonic() - began))
        (out / "figures.md").write_text(table(read(lines), machine, outcomes))
        say(f"  {problem or 'passed'}, {outcomes[-1].seconds:.0f} s")
    if curve.exists() and (problem := draw_curve(curve, out / "curve.png", machine.device)):
        say(problem)
    say((out / "figures.md").read_text())
    say(f"written to {out}; docs/benchmarks.md has a place for it")
    return int(any(each.problem for each in outcomes))


def main() -> int:
    """Measure this machine; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    what = "; ".join(f"{part.letter} {part.what}" for part in PARTS)
    parser.add_argument("--parts", default=DEFAULT, help=what)
    parser.add_argument("--seconds", type=float, default=360.0, help="for all parts together")
    parser.add_argument(
        "--model", type=Path, help="Hugging Face directory of part h; default: the tiny model"
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal"
    )
    given = parser.parse_args()
    options = ["--gpu-device", given.device]
    if given.model is not None:
        options += ["--gpu-model", str(given.model.absolute())]
    return measure(
        given.out,
        this_machine(given.device),
        options,
        letters=given.parts,
        seconds=given.seconds,
    )


if __name__ == "__main__":
    sys.exit(main())
