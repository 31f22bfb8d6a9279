"""One row per prompt group, as columns: what the group table of the page shows and filters by."""

from array import array
from typing import Any, Final

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
    """The fold. A group's row is its prompt index, because indices are drawn without a gap."""

    def __init__(self) -> None:
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
        self.drop_labels = list[str]()
        self._intended: tuple[int, ...] = ()  # groups of the step about to be finished

    def __len__(self) -> int:
        return len(self.step)

    def take(self, event: AnyEvent) -> None:
        """Add the next event."""
        match event:
            case Committed():
                self._committed(event.receipt)
            case Dispatched():
                self.attempts[event.prompt_index] = min(event.attempt, 65_535)
            case Admitted():
                self._admitted()
            case _:
                self._ended(event)

    def _ended(self, event: AnyEvent) -> None:
        match event:
            case StepApplied():
                for prompt_index in event.prompt_indices:
                    self.step[prompt_index] = event.version
            case Rewound():
                for undone in event.undone:
                    for prompt_index in undone.prompt_indices:
                        self.step[prompt_index] = 0
            case Dropped():
                self._drop(event.prompt_index, event.label)
            case StepIntent():
                self._intended = event.prompt_indices
            case StepRefused():
                for prompt_index in self._intended:
                    self._drop(prompt_index, DropReason.STEP_NOT_APPLIED)
            case _:
                pass

    def _admitted(self) -> None:
        for column in (self.step, self.attempts, self.span, self.masked, self.drops):
            column.append(0)
        for column in (self.reward, self.spread, self.tokens, self.generate_s):
            column.append(_NOT_COMMITTED)
        self.oldest.append(-1)

    def _committed(self, receipt: Receipt) -> None:
        row = receipt.prompt_index
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
        self.drops[prompt_index] = number

    # --- results ---------------------------------------------------------------------------------

    def telling(self, limit: int) -> list[int]:
        """Return the groups whose text and history are worth a place in the page, ascending.

        Those that something happened to, the best and the worst, the first and the last, and some at
        equal distances.
        """
        count = len(self)
        if not count:
            return []
        share = max(1, limit // 8)
        reward = np.array(self.reward, dtype=np.float64)
        ranked = np.argsort(np.where(np.isfinite(reward), reward, -np.inf), kind="stable")
        ranked = ranked[np.isfinite(reward[ranked])]
        happened = (
            np.flatnonzero(np.array(self.attempts) > 1),
            np.flatnonzero(np.array(self.span) > 0),
            np.flatnonzero(np.array(self.masked) > 0),
            np.flatnonzero(np.array(self.drops) > 0),
        )
        groups = [
            *(_some(found, share) for found in happened),
            ranked[:share],
            ranked[::-1][:share],
            np.arange(count - 1, -1, -1)[:share],
            np.linspace(0, count - 1, min(limit, count)).astype(np.int64),
        ]
        chosen = dict.fromkeys(int(row) for rows in groups for row in rows)
        return sorted(list(chosen)[:limit])

    def to_facts(self) -> dict[str, Any]:
        """Return the columns, from the first row shown on."""
        first = max(0, len(self) - MAX_ROWS)
        step, oldest = np.array(self.step, dtype=np.uint32), np.array(self.oldest)
        trained = (step > 0) & (oldest >= 0)
        stale = np.where(trained, step.astype(np.int64) - 1 - oldest, 0)
        columns: dict[str, NDArray[Any]] = {
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
        return {
            "first": first,
            "count": len(self) - first,
            "drop_labels": self.drop_labels,
            "columns": {name: column[first:] for name, column in columns.items()},
        }


def _some(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return at most so many rows, at equal distances."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
