"""Where the time of an actor went: every moment belongs to exactly one category. Pure but for the clock."""

import enum
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Final


class TrainerTime(enum.StrEnum):
    """What a trainer does, or waits for."""

    STARTING = "starting"
    COMPUTE = "compute"
    WAITING_GROUPS = "waiting_groups"
    WAITING_WEIGHTS = "waiting_weights"  # it stands still while generators take its weights
    CHECKPOINT = "checkpoint"
    CALLS = "calls"  # a call is on its way, or its payload is
    OTHER = "other"  # bookkeeping between two calls


class GeneratorTime(enum.StrEnum):
    """What an engine does, or waits for."""

    STARTING = "starting"
    COMPUTE = "compute"
    WAITING_GATE = "waiting_gate"  # nothing may be admitted: the trainer is behind
    WAITING_PROMPTS = "waiting_prompts"  # work may be admitted, none has come: environment, reward
    EPISODES = "episodes"  # groups are out, but in environment, reward or on their way
    SYNC = "sync"
    OTHER = "other"


class Verdict(enum.StrEnum):
    """What a step waited for most."""

    TRAINER = "trainer"
    GENERATORS = "generators"
    SYNC = "sync"
    REWARD = "reward"
    BALANCED = "balanced"


NOTICEABLE: Final = 0.1
"""Share of a step below which nobody's waiting decides the verdict."""


class TimeAccount:
    """Attributes the time of one actor, from its creation on, to one category at a time.

    At any moment the seconds by category sum to the time since creation.
    """

    def __init__(self, clock: Callable[[], float], category: str = "starting") -> None:
        """``clock`` never runs backwards; seconds."""
        self._clock = clock
        self._category = category
        self._since = clock()
        self._seconds = dict[str, float]()
        self._lap = dict[str, float]()

    @property
    def category(self) -> str:
        return self._category

    def switch(self, category: str) -> str:
        """Time counts for ``category`` from now on; returns the one before."""
        now = self._clock()
        before = self._category
        self._seconds[before] = self._seconds.get(before, 0.0) + (now - self._since)
        self._category, self._since = category, now
        return before

    @contextmanager
    def spending(self, category: str) -> Generator[None, None, None]:
        """Time in the block counts for ``category``; afterwards, for what it counted before."""
        before = self.switch(category)
        try:
            yield
        finally:
            self.switch(before)

    def seconds(self) -> dict[str, float]:
        """Since creation, by category; the one in progress is counted up to now."""
        self.switch(self._category)
        return dict(self._seconds)

    def lap(self) -> dict[str, float]:
        """Since the last lap, or creation, by category: the laps sum to ``seconds``."""
        seconds = self.seconds()
        lap = {name: value - self._lap.get(name, 0.0) for name, value in seconds.items()}
        self._lap = seconds
        return lap

    def fractions(self) -> dict[str, float]:
        """``seconds`` as shares; they sum to 1, or are empty before any time has passed."""
        return fractions(self.seconds())


def fractions(seconds: Mapping[str, float]) -> dict[str, float]:
    """Shares of the whole; zero entries are left out, and no time at all has no shares."""
    total = sum(seconds.values())
    return (
        {name: value / total for name, value in seconds.items() if value > 0} if total > 0 else {}
    )


def added(accounts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The seconds of several actors together, by category: those of a fleet."""
    total = dict[str, float]()
    for seconds in accounts:
        for name, value in seconds.items():
            total[name] = total.get(name, 0.0) + value
    return total


def verdict(
    trainer: Mapping[str, float],
    generators: Mapping[str, float],
    *,
    generate_s: float = 0.0,
    reward_s: float = 0.0,
) -> Verdict:
    """Who held the step up: the cause behind the longest waiting.

    Args:
        trainer: Seconds or shares of the step by ``TrainerTime``.
        generators: The same of all engines together, by ``GeneratorTime``.
        generate_s: Time of a group in the engine.
        reward_s: Time of a group in environment and reward. Where the trainer waits for groups and
            this is the longer part of a group's life, the reward is the cause.

    Returns:
        ``BALANCED`` when no waiting takes more than a tenth of the time.
    """
    waits, idle = fractions(trainer), fractions(generators)
    slow_rollouts = Verdict.REWARD if reward_s > generate_s else Verdict.GENERATORS
    causes = {
        slow_rollouts: waits.get(TrainerTime.WAITING_GROUPS, 0.0),
        Verdict.TRAINER: idle.get(GeneratorTime.WAITING_GATE, 0.0),
        Verdict.SYNC: max(
            waits.get(TrainerTime.WAITING_WEIGHTS, 0.0), idle.get(GeneratorTime.SYNC, 0.0)
        ),
    }
    worst = max(causes, key=lambda cause: causes[cause])
    return worst if causes[worst] > NOTICEABLE else Verdict.BALANCED
