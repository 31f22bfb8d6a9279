"""Rewards and staleness of the steps that stand: applied, and undone by no rewind. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

WINDOW_STEPS: Final = 20
"""Steps that ``reward_first`` and ``reward_last`` are means of."""


class _Step(NamedTuple):
    reward: float
    staleness: tuple[tuple[int, int], ...]  # (versions behind, samples)


class StandingSteps:
    """One entry a weight version, however often a version was made."""

    def __init__(self, size: int = WINDOW_STEPS) -> None:
        """``size`` steps are the first, or the last, of a run."""
        self._size = size
        self._steps: dict[int, _Step] = {}

    def add(self, version: int, reward: float, staleness: Mapping[int, int]) -> None:
        """The step that made ``version``; what was trained in place of it does not stand any more.

        Args:
            version: One more than the newest that stands.
            reward: Mean over its samples.
            staleness: Samples by versions behind.
        """
        self.undo_after(version - 1)
        self._steps[version] = _Step(reward, tuple(staleness.items()))

    def undo_after(self, version: int) -> None:
        """A rewind: later versions do not stand any more."""
        while self._steps and next(reversed(self._steps)) > version:
            self._steps.popitem()

    @property
    def first(self) -> float | None:
        """Mean reward over the first steps; None before any."""
        return _mean(step.reward for step in islice(self._steps.values(), self._size))

    @property
    def last(self) -> float | None:
        """Mean reward over the last steps; None before any."""
        return _mean(step.reward for step in self._newest())

    @property
    def recent(self) -> tuple[float, ...]:
        """Rewards of the last steps one by one, oldest first."""
        return tuple(step.reward for step in self._newest())[::-1]

    @property
    def staleness(self) -> dict[int, int]:
        """Samples by versions behind, over all steps."""
        total = Counter[int]()
        for step in self._steps.values():
            for behind, samples in step.staleness:
                total[behind] += samples
        return dict(sorted(total.items()))

    def _newest(self) -> Iterator[_Step]:
        return islice(reversed(self._steps.values()), self._size)


def _mean(rewards: Iterable[float]) -> float | None:
    found = list(rewards)
    return sum(found) / len(found) if found else None
