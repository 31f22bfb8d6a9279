"""Fetches the packages that ``make test-gpu`` needs on a machine without a network.

    python -m benchmarks.gpu_wheels DIR

That machine has Python 3.12, torch 2.11 with CUDA and transformers 5.17 with what these two require;
it lacks everything listed here. The wheels are fetched in the versions of ``constraints.txt``. Copy the
tree and DIR to the machine, and there run ``make test-gpu WHEELS=DIR PYTHON=python3``.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CONSTRAINTS: Final = Path(__file__).parents[1] / "constraints.txt"
PYTHON: Final = "3.12"
MOST_MB: Final = 45.0
PACKAGES: Final = (
    *("msgspec", "structlog", "psutil", "xxhash", "tensordict", "pyvers", "cloudpickle"),
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection"),
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict"),
    *("propcache", "yarl", "idna"),
    *("rich", "markdown-it-py", "mdurl", "Pygments", "typer", "click", "shellingham"),
    "megatron-core",
    *("pytest", "pytest-timeout", "pluggy", "iniconfig", "hypothesis", "sortedcontainers"),
    *("matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pillow", "pyparsing"),
    *("python-dateutil", "six"),
)
"""Of a run in one process, of megatron-core, of the tests, of the curve. pyarrow, which is larger than
all of these, is not needed with ``rollout.log=false``."""

GLIBC: Final = (5, 12, 17, 24, 27, 28, 31, 34)


def read_pins(constraints: str, names: Sequence[str]) -> list[str]:
    """Return ``NAME==VERSION`` for each name.

    Raises:
        ValueError: A name has no exact version in the constraints.
    """
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    pins = {_normalize(line.partition("==")[0]): line for line in lines if "==" in line}
    if missing := [name for name in names if _normalize(name) not in pins]:
        raise ValueError(f"{', '.join(missing)}: no exact version in {CONSTRAINTS.name}; add one")
    return [pins[_normalize(name)] for name in names]


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch_wheels(directory: Path, pins: Sequence[str]) -> int:
    """Download wheels of these versions for the machine; return pip's exit code."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    return subprocess.run([*command, f"--dest={directory}", *pins], check=False).returncode


def list_wheels(directory: Path) -> tuple[str, float]:
    """Return a table of the wheels in a directory, largest first, and their size in MB."""
    sizes = {path.name: path.stat().st_size / 1e6 for path in directory.glob("*.whl")}
    rows = [f"{size:8.2f}  {name}" for name, size in sorted(sizes.items(), key=lambda x: -x[1])]
    total = sum(sizes.values())
    return "\n".join([*rows, f"{total:8.2f}  MB in {len(sizes)} wheels"]), total


def main() -> int:
    """Fetch the wheels and list them; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR", help="new or empty directory")
    directory: Path = parser.parse_args().directory
    if directory.exists() and any(directory.iterdir()):
        sys.stderr.write(
            f"{directory} is not empty: two versions of a package would stop the install\n"
        )
        return 2
    if code := fetch_wheels(directory, read_pins(CONSTRAINTS.read_text(), PACKAGES)):
        return code
    text, total = list_wheels(directory)
    sys.stdout.write(f"{text}\n")
    if total > MOST_MB:
        sys.stderr.write(
            f"{total:.1f} MB is more than {MOST_MB:g} MB: remove a package from PACKAGES\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
