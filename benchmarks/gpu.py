"""Runs the tests of a CUDA machine, and writes what they measured as a table.

    python -m benchmarks.gpu [--model DIR] [--out runs/gpu]

Without a CUDA device it says so and ends with 0: nothing failed, and nothing was shown.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_figures import Machine, read, table

ROOT = Path(__file__).parents[1]
NO_CUDA = "no CUDA device is visible to torch {version}: nothing was run, and nothing was shown"
Run = Callable[[Sequence[str]], int]


def this_machine(device: str) -> Machine | None:
    """Return the machine of a torch device; None if there is no such device."""
    if device == "cpu":
        return Machine("cpu", 1, torch.__version__, "")
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return Machine(name, torch.cuda.device_count(), torch.__version__, str(torch.version.cuda))


def run_tests(command: Sequence[str]) -> int:
    """Run a command in the root of the repository; return its exit code."""
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def measured(
    out: Path,
    machine: Machine | None,
    options: Sequence[str],
    *,
    run: Run = run_tests,
    say: Callable[[str], None] = print,
) -> int:
    """Run the tests and write the table; return the exit code of the tests.

    Args:
        out: Directory of ``figures.jsonl`` and ``figures.md``, which are written anew.
        machine: The machine; None: it has no CUDA device, and no test is run.
        options: Further options of pytest.
        run: Runs a command and returns its exit code.
        say: Prints a line.
    """
    if machine is None:
        say(NO_CUDA.format(version=torch.__version__))
        return 0
    lines = out.absolute() / "figures.jsonl"
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--figures", str(lines), *options]
    code = run(command)
    text = table(read(lines), machine, failed=code != 0)
    out.mkdir(parents=True, exist_ok=True)
    (out / "figures.md").write_text(text)
    say(text)
    say(f"written to {out / 'figures.md'}; docs/benchmarks.md has a place for it")
    return code


def main() -> int:
    """Measure this machine; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument(
        "--model", type=Path, help="Hugging Face directory; default: the tiny model"
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal"
    )
    given = parser.parse_args()
    options = ["--gpu-device", given.device]
    if given.model is not None:
        options += ["--gpu-model", str(given.model.absolute())]
    return measured(given.out, this_machine(given.device), options)


if __name__ == "__main__":
    sys.exit(main())
