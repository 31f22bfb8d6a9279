"""One row per prompt group, as columns: what the group table of the page shows and filters by."""

from array import array
from collections.abc import Sequence
from typing import Any, Final, Self

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
"""Groups of longer runs are shown from their end; beyond it the file would pass its size."""
_NOT_COMMITTED: Final = float("nan")
_DROP_LABELS: Final = 255  # a byte per group


class GroupRows:
    """The fold over one stretch of a journal, of the groups that are drawn in it.

    A group's row is its prompt index less the first one, because indices are drawn without a gap.
    """

    def __init__(self, first: int = 0, drop_labels: list[str] | None = None) -> None:
        """``first`` is the number of groups drawn before; stretches share their ``drop_labels``."""
        self._first = first
        self.step = array("I")  # that trained it; 0: none
        self.attempts = array("H")
        self.reward = array("f")  # mean over the valid samples
        self.spread = array("f")  # population's standard deviation of them
        self.tokens = array("f")  # mean response tokens of a sample
        self.oldest = array("i")
        self.span = array("H")  # versions between its oldest and its newest token
        self.masked = array("H")  # samples
        self.generate_s = array("f")
        self.drops = array("B")  # 0: not dropped; else the position of its label, from 1
        self.drop_labels = list[str]() if drop_labels is None else drop_labels
        self._intended: tuple[int, ...] = ()  # groups of the step about to be finished

    def __len__(self) -> int:
        return len(self.step)

    def _row(self, prompt_index: int) -> int | None:
        """Return the row of a group; None for one that was drawn before."""
        return prompt_index - self._first if prompt_index >= self._first else None

    def take(self, event: AnyEvent) -> None:
        """Add the next event."""
        match event:
            case Committed():
                self._committed(event.receipt)
            case Dispatched():
                row = self._row(event.prompt_index)
                if row is not None:
                    self.attempts[row] = min(event.attempt, 65_535)
            case Admitted():
                self._admitted()
            case _:
                self._ended(event)

    def _ended(self, event: AnyEvent) -> None:
        match event:
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
            if row is not None:
                self.step[row] = version

    def _admitted(self) -> None:
        for column in (self.step, self.attempts, self.span, self.masked, self.drops):
            column.append(0)
        for column in (self.reward, self.spread, self.tokens, self.generate_s):
            column.append(_NOT_COMMITTED)
        self.oldest.append(-1)

    def _committed(self, receipt: Receipt) -> None:
        row = self._row(receipt.prompt_index)
        if row is None:
            return
        rewards, lengths = receipt.valid_rewards, receipt.of_valid(receipt.response_tokens)
        mean = sum(rewards) / len(rewards) if rewards else _NOT_COMMITTED
        self.reward[row] = mean
        # Equal rewards have exactly no deviation: the filter "all rewards equal" asks for 0.
        equal = not rewards or min(rewards) == max(rewards)
        squares = 0.0 if equal else sum((reward - mean) ** 2 for reward in rewards)
        self.spread[row] = (squares / len(rewards)) ** 0.5 if rewards else _NOT_COMMITTED
        self.tokens[row] = sum(lengths) / len(lengths) if lengths else _NOT_COMMITTED
        self.oldest[row] = receipt.oldest_version
        self.span[row] = min(receipt.newest_version - receipt.oldest_version, 65_535)
        self.masked[row] = min(receipt.masked_samples, 65_535)
        self.generate_s[row] = receipt.generate_s

    def _drop(self, prompt_index: int, label: str) -> None:
        if label not in self.drop_labels and len(self.drop_labels) < _DROP_LABELS:
            self.drop_labels.append(label)
        number = self.drop_labels.index(label) + 1 if label in self.drop_labels else _DROP_LABELS
        row = self._row(prompt_index)
        if row is not None:
            self.drops[row] = number

    # --- results ---------------------------------------------------------------------------------

    def ended(self, undone_to: int | None) -> NDArray[np.int64]:
        """Return the rows of groups that were trained or dropped, and not undone later.

        What happened to the other groups is not in this stretch of the journal.
        """
        step = np.array(self.step, dtype=np.int64)
        trained = step > 0 if undone_to is None else (step > 0) & (step <= undone_to)
        return np.flatnonzero(trained | (np.array(self.drops) > 0))

    def columns(self, rows: NDArray[np.int64] | None = None) -> "GroupColumns":
        """Return these rows as columns; None: all."""
        step, oldest = np.array(self.step, dtype=np.uint32), np.array(self.oldest)
        trained = (step > 0) & (oldest >= 0)
        stale = np.where(trained, step.astype(np.int64) - 1 - oldest, 0)
        columns: dict[str, NDArray[Any]] = {
            "index": np.arange(self._first, self._first + len(step), dtype=np.int64),
            "step": step,
            "attempts": np.array(self.attempts),
            "reward": np.array(self.reward),
            "spread": np.array(self.spread),
            "tokens": np.array(self.tokens),
            "stale": np.clip(stale, 0, 65_535).astype(np.uint16),
            "span": np.array(self.span),
            "masked": np.array(self.masked),
            "generate_s": np.array(self.generate_s),
            "dropped": np.array(self.drops),
        }
        if rows is not None:
            columns = {name: column[rows] for name, column in columns.items()}
        return GroupColumns(columns, self.drop_labels)


class GroupColumns:
    """Rows of the group table as columns, by ascending prompt index."""

    def __init__(self, columns: dict[str, NDArray[Any]], drop_labels: list[str]) -> None:
        self.columns, self.drop_labels = columns, drop_labels

    def __len__(self) -> int:
        return len(self.columns["index"])

    @classmethod
    def of(cls, stretches: Sequence["GroupColumns"]) -> Self:
        """Return the rows of several stretches, ascending, which share their drop labels."""
        if not stretches:
            empty = GroupRows().columns()
            return cls(empty.columns, empty.drop_labels)
        names = stretches[0].columns
        joined = {
            name: np.concatenate([each.columns[name] for each in stretches]) for name in names
        }
        return cls(joined, stretches[0].drop_labels)

    def examples(self, limit: int) -> list[int]:
        """Return example groups, whose text and history the page shows, ascending.

        Those that something happened to, the best and the worst, the first and the last, and some at
        equal distances.
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
        """Return the columns, of more rows the last ones."""
        first = max(0, len(self) - most_rows)
        columns = {name: column[first:] for name, column in self.columns.items()}
        index = columns.pop("index")
        return {
            # A consecutive index is one number; four bytes a row would be half of the table.
            "runs": [[int(index[each[0]]), len(each)] for each in _consecutive(index)],
            "count": len(index),
            "drop_labels": self.drop_labels,
            "columns": columns,
        }


def _consecutive(index: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the positions of each run of consecutive numbers."""
    if not len(index):
        return []
    return np.split(np.arange(len(index)), np.flatnonzero(np.diff(index) != 1) + 1)


def _some(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return at most so many rows, at equal distances."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
