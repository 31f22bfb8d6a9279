"""Rewards and staleness of all applied steps, except steps that a rewind undid. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

WINDOW_STEPS: Final = 20
"""Maximum number of steps over which ``reward_first`` and ``reward_last`` are averaged."""


def count_window(steps: int) -> int:
    """Return the number of steps in each window: 20, or half of a run of fewer than 40 steps."""
    return max(1, min(WINDOW_STEPS, steps // 2))


class AppliedStepHistory(msgspec.Struct):
    """Sums over the steps of the present lineage, in constant space.

    Sums are not enough to undo steps. So for a rewind, the caller passes the staleness counts of
    the undone steps and the rewards before them.
    """

    first_rewards: list[float] = []  # msgspec copies the default for each instance
    last_rewards: list[float] = []  # oldest first
    samples: dict[int, int] = {}  # number by versions behind

    def add(self, reward: float, staleness: Iterable[tuple[int, int]]) -> None:
        """Add one step.

        Args:
            reward: Mean reward over the step's samples.
            staleness: Pairs of (versions behind, samples).
        """
        if len(self.first_rewards) < WINDOW_STEPS:
            self.first_rewards.append(reward)
        self.last_rewards.append(reward)
        del self.last_rewards[:-WINDOW_STEPS]
        for behind, samples in staleness:
            self.samples[behind] = self.samples.get(behind, 0) + samples

    def take_back(self, staleness: Iterable[tuple[int, int]]) -> None:
        """Subtract the samples of a step that a rewind undid. Call ``cut`` afterwards."""
        for behind, samples in staleness:
            self.samples[behind] -= samples
            if not self.samples[behind]:
                del self.samples[behind]

    def cut(self, steps: int, last_rewards: Sequence[float]) -> None:
        """Keep the rewards of the first ``steps`` steps. ``last_rewards`` are the last of these."""
        del self.first_rewards[steps:]
        self.last_rewards = list(last_rewards[-WINDOW_STEPS:])

    def mean_first(self, steps: int) -> float | None:
        """Return the mean reward over the first window of ``steps`` steps, or None without any."""
        return _mean(self.first_rewards[: count_window(steps)])

    def mean_last(self, steps: int) -> float | None:
        """Return the mean reward over the last window of ``steps`` steps, or None without any."""
        return _mean(self.last_rewards[-count_window(steps) :])

    @property
    def last(self) -> float | None:
        """Mean reward over the last 20 steps, fewer in the beginning, or None before the first."""
        return _mean(self.last_rewards)

    @property
    def recent(self) -> tuple[float, ...]:
        """Rewards of the last steps one by one, oldest first."""
        return tuple(self.last_rewards)

    @property
    def staleness(self) -> dict[int, int]:
        """Return the number of samples by versions behind, over all steps."""
        return dict(sorted(self.samples.items()))


def _mean(rewards: Sequence[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None
