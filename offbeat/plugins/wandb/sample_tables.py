"""Finds the text of trained samples in ``rollouts/``, and makes the rows of W&B's tables.

A rollout file appears up to ten minutes after its groups, often after they are trained. So a table
waits until all its samples are found. Memory is bounded: a table that waits too long is made of the
samples that are found.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.step_samples import SampleRow
from offbeat.telemetry.tracker import TrackedRun

if TYPE_CHECKING:
    from offbeat.runs.logged_samples import LoggedGroups, Row

COLUMNS: Final = (
    *("step", "version", "prompt_index", "sample", "prompt", "response", "reward", "advantage"),
    "finish_reason",
)
TEXT_CHARACTERS: Final = 2000
_MOST_WAITING: Final = 16  # tables
_LOOK_EVERY_S: Final = 10.0
_READ_BYTES: Final = 256 * 2**20  # of rollout files, decompressed, at each look


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples of some steps, with their text."""

    step: int  # newest one
    rows: list[tuple[Any, ...]]  # of COLUMNS


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A step with samples to show."""

    step: int
    version: int
    samples: tuple[SampleRow, ...]


class SampleTables:
    """Makes a table of the samples of step 1 and of every ``interval`` steps.

    All calls come from the sink's thread, which may block.
    """

    def __init__(
        self,
        run_dir: Path,
        model_path: str,
        interval: int,
        rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._model_path = run_dir, model_path
        self._interval, self._rows, self._clock = interval, rows, clock
        self._waiting = deque[_Waiting]()
        self._looked_at = float("-inf")
        self._files: Any = None
        self._text: Any = None

    def add(self, record: MetricRecord) -> None:
        """Add the samples of a step if a table of it is due."""
        step = record.step
        if record.samples is not None and (step == 1 or step % self._interval == 0):
            rows = record.samples.rows[: self._rows]
            self._waiting.append(_Waiting(step, record.version, rows))

    def take(self, *, is_last: bool = False) -> SampleTable | None:
        """Return the samples of all steps whose texts are found, oldest first, as one table.

        With ``is_last``, or of a step that waited too long, also return some of its samples.
        """
        now = self._clock()
        if not self._waiting or not (is_last or now - self._looked_at >= _LOOK_EVERY_S):
            return None
        self._looked_at = now
        logged, shown, newest = self._read(), list[tuple[Any, ...]](), 0
        while self._waiting:
            oldest = self._waiting[0]
            rows = [row for each in oldest.samples if (row := self._row(oldest, each, logged))]
            is_given_up = is_last or len(self._waiting) > _MOST_WAITING
            if len(rows) < len(oldest.samples) and not is_given_up:
                break
            shown, newest = [*shown, *rows], oldest.step
            self._waiting.popleft()
        return SampleTable(newest, shown) if shown else None

    def _read(self) -> "LoggedGroups":
        """Read the logged rows of all waiting samples."""
        from offbeat.runs.logged_samples import RolloutFiles, read_logged_rows  # noqa: PLC0415  pyarrow

        self._files = self._files or RolloutFiles(self._run_dir)
        groups = {each.prompt_index for table in self._waiting for each in table.samples}
        logged, _ = read_logged_rows(self._run_dir, groups, _READ_BYTES, self._files)
        return logged

    def _row(
        self, table: _Waiting, sample: SampleRow, logged: "LoggedGroups"
    ) -> tuple[Any, ...] | None:
        branches = logged.get((sample.prompt_index, sample.attempt), {}).get(sample.sample)
        if not branches:
            return None
        row = branches[-1]  # an agent's last branch has its final answer
        return (
            table.step,
            table.version,
            sample.prompt_index,
            sample.sample,
            self._shown(row, "prompt"),
            (f"[branch {len(branches)} of {len(branches)}] " if len(branches) > 1 else "")
            + self._shown(row, "response"),
            sample.reward,
            sample.advantage,
            row.get("finish_reason") or "",
        )

    def _shown(self, row: "Row", name: str) -> str:
        """Return a text of a row, decoded if only its tokens were logged, and cut."""
        text = row[name]
        if text is None:
            if self._text is None:
                from offbeat.runs.logged_samples import token_text  # noqa: PLC0415  pyarrow

                self._text = token_text(self._run_dir, self._model_path)
            text = self._text.of((row[f"{name}_ids"] or [])[:TEXT_CHARACTERS])
        left_out = len(text) - TEXT_CHARACTERS
        return f"{text[:TEXT_CHARACTERS]} [... {left_out} more]" if left_out > 0 else text


def tables_of(run: TrackedRun, interval: int, rows: int) -> SampleTables | None:
    """Return the tables of a run, or None if its recipe has none."""
    rollout: Mapping[str, Any] = run.recipe.get("rollout") or {}
    model: Mapping[str, Any] = run.recipe.get("model") or {}
    if not (interval and rollout.get("log", True)):
        return None
    return SampleTables(run.run_dir, str(model.get("path") or ""), interval, rows)
