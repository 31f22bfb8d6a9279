"""Figures that the tests on a CUDA machine measured, as a table for docs/benchmarks.md.

Each test appends lines of JSON to one file; whatever a failed test did not measure is not in the
table.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """One measured figure."""

    what: str
    value: float
    unit: str
    how: str  # sizes and settings that it was measured with


class Machine(msgspec.Struct, frozen=True):
    """The machine that the figures are of."""

    device: str  # cpu, or the name of the GPU
    devices: int
    torch: str
    cuda: str  # empty: none


class Outcome(msgspec.Struct, frozen=True):
    """How a part ended."""

    part: str
    what: str
    problem: str  # empty: it passed
    seconds: float


def append(path: Path, figure: Figure) -> None:
    """Append a figure to a file, which is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(figure) + b"\n")


def read(path: Path) -> list[Figure]:
    """Return the figures of a file in order; none if it does not exist.

    Raises:
        msgspec.DecodeError: A line is not a figure.
    """
    if not path.is_file():
        return []
    return [msgspec.json.decode(line, type=Figure) for line in path.read_bytes().splitlines()]


def table(figures: Sequence[Figure], machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """Return how the parts ended, and the figures, as two Markdown tables with the machine."""
    count = f"{machine.devices} x " if machine.devices > 1 else ""
    cuda = f", CUDA {machine.cuda}" if machine.cuda else ""
    lines = [
        f"Machine: {count}{machine.device}, torch {machine.torch}{cuda}. Command: `make test-gpu`.",
        "",
        "| part | outcome | s |",
        "|---|---|---|",
    ]
    lines += [
        f"| {each.part}: {each.what} | {_cell(each.problem or 'passed')} | {each.seconds:.0f} |"
        for each in outcomes
    ]
    lines += ["", "| figure | value | measured with |", "|---|---|---|"]
    lines += [
        f"| {_cell(each.what)} | {_number(each.value)} {each.unit} | {_cell(each.how)} |"
        for each in figures
    ]
    if not figures:
        lines.append("| none | | |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Return three significant digits, or all of a whole number."""
    if value == round(value):
        return f"{round(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
