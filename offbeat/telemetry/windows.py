"""Means over the first and the last steps of a run. Pure."""

from collections import deque
from typing import Final

WINDOW_STEPS: Final = 20
"""Steps that ``reward_first`` and ``reward_last`` are means of."""


class RewardWindow:
    """Rewards of the first and of the last ``size`` steps, whatever the length of the run."""

    def __init__(self, size: int = WINDOW_STEPS) -> None:
        self._size = size
        self._first = list[float]()
        self._last = deque[float](maxlen=size)

    def add(self, reward: float) -> None:
        """The mean reward of one more step."""
        if len(self._first) < self._size:
            self._first.append(reward)
        self._last.append(reward)

    @property
    def first(self) -> float | None:
        """Mean over the first steps; None before any."""
        return _mean(self._first)

    @property
    def last(self) -> float | None:
        """Mean over the last steps; None before any."""
        return _mean(self._last)

    @property
    def recent(self) -> tuple[float, ...]:
        """The last steps one by one, oldest first."""
        return tuple(self._last)


def _mean(rewards: "list[float] | deque[float]") -> float | None:
    return sum(rewards) / len(rewards) if rewards else None
