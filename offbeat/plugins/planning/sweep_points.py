"""Points of a sweep: combinations of settings with their measurements, on disk."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from offbeat.messages.failures import OffbeatError

Outcome = Literal["ok", "out_of_memory", "killed", "hung", "failed", "invalid"]


class UnusableSweep(OffbeatError):
    """A sweep that cannot be run as requested.

    Fix: follow the message (docs/sweep.md).
    """

    problem: str

    def __str__(self) -> str:
        return self.problem


class SweepPoint(msgspec.Struct, frozen=True):
    """One combination of settings, and its outcome. Missing figures are 0."""

    settings: tuple[str, ...]  # key=value, in the order of the sweep
    outcome: Outcome
    detail: str = ""  # why figures are missing
    ranks: int = 0
    parameters: int = 0
    step_s: float = 0.0
    tokens: int = 0  # of one step over all ranks
    peak_mib: float = 0.0  # highest over ranks and phases
    phases_mib: dict[str, float] = {}  # highest over ranks, by phase
    phases_s: dict[str, float] = {}  # of the slowest rank, by phase
    # Estimated; None: unknown.
    held_mib: float | None = None  # weights, gradients, optimizer of the rank that holds most
    activations_mib: float | None = None  # of the largest microbatch

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and rank."""
        return self.tokens / self.step_s / self.ranks if self.outcome == "ok" else 0.0

    @property
    def estimate(self) -> str:
        """Estimated MiB of a rank. A ``>`` in front means without activations. Empty if unknown."""
        if self.held_mib is None:
            return ""
        if self.activations_mib is None:
            return f">{self.held_mib:,.0f}"
        return f"{self.held_mib + self.activations_mib:,.0f}"


class _Header(msgspec.Struct, frozen=True):
    sweep: str  # digest of everything that affects a figure except the settings


def combinations(over: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the settings of every point of ``KEY=VALUE,VALUE`` axes; the last axis varies fastest.

    Raises:
        UnusableSweep: An axis without values, or given twice.
    """
    axes = list[list[str]]()
    for axis in over:
        key, equals, values = axis.partition("=")
        if not (key and equals and values):
            raise UnusableSweep(
                f"--over {axis}: expected KEY=VALUE,VALUE, as in trainer.threads=1,2"
            )
        if any(each[0].startswith(f"{key}=") for each in axes):
            raise UnusableSweep(f"--over {key} is given twice: list all of its values once")
        try:
            listed = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError:
            raise UnusableSweep(f"--over {axis}: the values are not a YAML list") from None
        axes.append([f"{key}={_written(value)}" for value in listed])
    return list(itertools.product(*axes))


class SweepFile:
    """Results of a sweep as JSON Lines. A point is written once, when it has been measured."""

    def __init__(self, path: Path, identity: str) -> None:
        """Open or create the file.

        Args:
            path: The file. Its directory is created if missing.
            identity: Digest of recipe, lengths and versions, without the settings that vary.

        Raises:
            UnusableSweep: The file holds a different sweep, or is not a sweep's file.
        """
        self.path = path
        self._found = dict[tuple[str, ...], SweepPoint]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise UnusableSweep(f"--out {path} is a directory: name a file in it")
        if not path.exists():
            self._append(_Header(identity))
            return
        whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
        try:
            header = msgspec.json.decode(whole[0], type=_Header) if whole else None
            for line in whole[1:]:
                point = msgspec.json.decode(line, type=SweepPoint)
                self._found[point.settings] = point
        except msgspec.DecodeError as error:
            raise UnusableSweep(
                f"{path} is not a file of a sweep ({error}): name another one"
            ) from error
        if header is None or header.sweep != identity:
            raise UnusableSweep(
                f"{path} has a sweep of another recipe, other lengths or other versions: remove "
                "it, or name another file with --out"
            )
        # A kill may have truncated the last line. Its point is measured again.
        os.truncate(path, sum(len(line) + 1 for line in whole))

    def get(self, settings: tuple[str, ...]) -> SweepPoint | None:
        """Return the point measured at these settings, or None."""
        return self._found.get(settings)

    def add(self, point: SweepPoint) -> None:
        """Add a point. It is on disk when this returns."""
        self._found[point.settings] = point
        self._append(point)

    def __iter__(self) -> Iterator[SweepPoint]:
        return iter(self._found.values())

    def _append(self, record: msgspec.Struct) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def table(points: Sequence[SweepPoint]) -> str:
    """Return the points as a table, fastest first and points without figures last."""
    ranked = sorted(points, key=lambda each: (each.outcome != "ok", -each.tokens_per_s))
    rows = [("settings", "ranks", "s/step", "tokens/s/rank", "estimate MiB", "peak MiB", "")]
    rows += [
        (
            " ".join(each.settings),
            *(
                (str(each.ranks), f"{each.step_s:.3g}", f"{each.tokens_per_s:,.0f}")
                if each.outcome == "ok"
                else ("", "", "")
            ),
            each.estimate,
            f"{each.peak_mib:,.0f}" if each.outcome == "ok" else "",
            "" if each.outcome == "ok" else f"{each.outcome.replace('_', ' ')}: {each.detail}",
        )
        for each in ranked
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(row[at].rjust(widths[at]) for at in range(1, 6)), row[6]]
        ).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def _written(value: Any) -> str:  # noqa: ANN401 -- whatever YAML makes
    if isinstance(value, Mapping | list):
        return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return yaml.safe_dump(value).partition("\n")[0]
