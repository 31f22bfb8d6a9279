"""One row per prompt group, as columns, for the page's group table and its filters."""

import math
from collections.abc import Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Committed,
    Dispatched,
    Dropped,
    DropReason,
    Rewound,
    StepApplied,
    StepIntent,
    StepRefused,
)
from offbeat.messages.groups import Receipt

MAX_ROWS: Final = 200_000
"""Maximum number of rows. Of a longer run only the last groups are shown, to limit the page's
size."""
_DROP_LABELS: Final = 255  # one byte per group


class GroupRow(msgspec.Struct):
    """Figures of one group, as one row of the table."""

    index: int
    step: int = 0  # step that trained it; 0: none
    attempts: int = 0
    reward: float = math.nan  # mean over the valid samples; NaN: not committed
    spread: float = math.nan  # population standard deviation of these rewards
    tokens: float = math.nan  # mean response tokens of a sample
    stale: int = 0  # versions between its oldest token and the step that trained it
    span: int = 0  # versions between its oldest and its newest token
    masked: int = 0  # number of masked samples
    generate_s: float = math.nan
    dropped: int = 0  # 0: not dropped; else the position of its label, from 1
    oldest: int = -1  # version of its oldest token


_COLUMNS: Final = np.dtype(
    {
        "names": GroupRow.__struct_fields__,
        "formats": ["i8", "u4", "u2", "f4", "f4", "f4", "u2", "u2", "u2", "f4", "u1", "i4"],
    }
)
_MOST: Final = 65_535  # maximum of a two-byte column


class GroupRows:
    """Fold over one stretch of a journal, for the groups that are drawn in it.

    Indices are drawn without a gap, so a group's place in ``rows`` is its prompt index minus the
    first index.
    """

    def __init__(self, first: int = 0, drop_labels: list[str] | None = None) -> None:
        """``first`` is the number of groups drawn before. Stretches share their ``drop_labels``."""
        self._first = first
        self.rows = list[GroupRow]()
        self.drop_labels = list[str]() if drop_labels is None else drop_labels
        self._intended: tuple[int, ...] = ()  # groups of the step about to be finished

    def _row(self, prompt_index: int) -> GroupRow:
        """Return the row of a group, or a row to discard if the group was drawn before."""
        is_own = prompt_index >= self._first
        return self.rows[prompt_index - self._first] if is_own else GroupRow(prompt_index)

    def take(self, event: AnyEvent) -> None:  # noqa: C901 - the table of events
        """Add the next event."""
        match event:
            case Committed():
                self._committed(event.receipt)
            case Dispatched():
                self._row(event.prompt_index).attempts = min(event.attempt, _MOST)
            case Admitted():
                self.rows.append(GroupRow(event.prompt_index))
            case StepApplied():
                self._trained(event.prompt_indices, event.version)
            case Rewound():
                for undone in event.undone:
                    self._trained(undone.prompt_indices, 0)
            case Dropped():
                self._drop(event.prompt_index, event.label)
            case StepIntent():
                self._intended = event.prompt_indices
            case StepRefused():
                for prompt_index in self._intended:
                    self._drop(prompt_index, DropReason.STEP_NOT_APPLIED)
            case _:
                pass

    def _trained(self, prompt_indices: tuple[int, ...], version: int) -> None:
        for prompt_index in prompt_indices:
            row = self._row(prompt_index)
            row.step = version
            stale = version - 1 - row.oldest if version and row.oldest >= 0 else 0
            row.stale = min(max(stale, 0), _MOST)

    def _committed(self, receipt: Receipt) -> None:
        row = self._row(receipt.prompt_index)
        rewards, lengths = receipt.valid_rewards, receipt.of_valid(receipt.response_tokens)
        row.reward = mean = sum(rewards) / len(rewards) if rewards else math.nan
        # Equal rewards need a deviation of exactly 0, because the filter "all rewards equal" asks
        # for 0.
        equal = not rewards or min(rewards) == max(rewards)
        squares = 0.0 if equal else sum((reward - mean) ** 2 for reward in rewards)
        row.spread = (squares / len(rewards)) ** 0.5 if rewards else math.nan
        row.tokens = sum(lengths) / len(lengths) if lengths else math.nan
        row.oldest = receipt.oldest_version
        row.span = min(receipt.newest_version - receipt.oldest_version, _MOST)
        row.masked = min(receipt.masked_samples, _MOST)
        row.generate_s = receipt.generate_s

    def _drop(self, prompt_index: int, label: str) -> None:
        if label not in self.drop_labels and len(self.drop_labels) < _DROP_LABELS:
            self.drop_labels.append(label)
        number = self.drop_labels.index(label) + 1 if label in self.drop_labels else _DROP_LABELS
        self._row(prompt_index).dropped = number

    # --- results ---------------------------------------------------------------------------------

    def columns(self, *, ended_by: float | None = None) -> "GroupColumns":
        """Return the rows as columns.

        With ``ended_by``, only rows of groups that were dropped or trained up to this version.
        Other groups ended outside of this stretch of the journal, or were undone later.
        """
        columns = np.array([msgspec.structs.astuple(row) for row in self.rows], _COLUMNS)
        if ended_by is not None:
            step = columns["step"]
            columns = columns[((step > 0) & (step <= ended_by)) | (columns["dropped"] > 0)]
        return GroupColumns(columns, self.drop_labels)


class GroupColumns:
    """Rows of the group table by ascending prompt index, as a structured array."""

    def __init__(self, columns: NDArray[Any], drop_labels: list[str]) -> None:
        self.columns, self.drop_labels = columns, drop_labels

    def __len__(self) -> int:
        return len(self.columns)

    @classmethod
    def of(cls, stretches: Sequence["GroupColumns"], drop_labels: list[str]) -> Self:
        """Return the rows of several stretches, ascending. They share their drop labels."""
        empty = np.zeros(0, _COLUMNS)
        return cls(np.concatenate([empty, *(each.columns for each in stretches)]), drop_labels)

    def examples(self, limit: int) -> list[int]:
        """Return the groups that the page shows with text and history, ascending.

        They are groups with special events, the best and the worst, the first and the last, and
        some at equal distances.
        """
        count = len(self)
        if not count or not limit:
            return []
        share = max(1, limit // 8)
        reward = self.columns["reward"].astype(np.float64)
        ranked = np.argsort(np.where(np.isfinite(reward), reward, -np.inf), kind="stable")
        ranked = ranked[np.isfinite(reward[ranked])]
        happened = (
            np.flatnonzero(self.columns["attempts"] > 1),
            *(np.flatnonzero(self.columns[name] > 0) for name in ("span", "masked", "dropped")),
        )
        groups = [
            *(_some(found, share) for found in happened),
            ranked[:share],
            ranked[::-1][:share],
            np.arange(count - 1, -1, -1)[:share],
            np.linspace(0, count - 1, min(limit, count)).astype(np.int64),
        ]
        chosen = list(dict.fromkeys(int(row) for rows in groups for row in rows))[:limit]
        return sorted(int(self.columns["index"][row]) for row in chosen)

    def to_facts(self, most_rows: int = MAX_ROWS) -> dict[str, Any]:
        """Return the columns; only the last ``most_rows`` rows if there are more."""
        columns = self.columns[max(0, len(self) - most_rows) :]
        index = columns["index"]
        shown = (name for name in GroupRow.__struct_fields__ if name not in {"index", "oldest"})
        return {
            # A run of consecutive indices is stored as one number. Four bytes a row would be half
            # of the table.
            "runs": [[int(index[each[0]]), len(each)] for each in _consecutive(index)],
            "count": len(index),
            "drop_labels": self.drop_labels,
            "columns": {name: columns[name] for name in shown},
        }


def _consecutive(index: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the positions of each run of consecutive numbers."""
    if not len(index):
        return []
    return np.split(np.arange(len(index)), np.flatnonzero(np.diff(index) != 1) + 1)


def _some(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return at most ``count`` rows, at equal distances."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
