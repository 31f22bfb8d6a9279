"""Accounts for an actor's time: every moment belongs to exactly one category.

Pure but for the clock.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Final


class TrainerTime(enum.StrEnum):
    """Categories of a trainer's time: its work, or what it waits for."""

    STARTING = "starting"
    COMPUTE = "compute"
    CALLS = "calls"  # a call is on its way, or its payload is
    CONTROLLER = "controller"  # between two calls: advantages, ledger, journal
    WAITING_GROUPS = "waiting_groups"
    WAITING_WEIGHTS = "waiting_weights"  # it stands still while generators take its weights
    WAITING_GATE = "waiting_gate"  # an operator paused the run
    SYNC = "sync"  # it publishes its weights
    CHECKPOINT = "checkpoint"
    INCIDENT = "incident"  # a step is aborted, the trainer replaced, the run taken back
    OTHER = "other"  # nobody has said


class GeneratorTime(enum.StrEnum):
    """Categories of an engine's time: its work, or what it waits for."""

    STARTING = "starting"
    COMPUTE = "compute"
    EPISODES = "episodes"  # groups are out, but in environment, reward or on their way
    WAITING_GATE = "waiting_gate"  # nothing may be admitted: the trainer is behind
    WAITING_WEIGHTS = "waiting_weights"  # it may not serve before a sync
    SYNC = "sync"  # it takes weights
    EVALUATION = "evaluation"
    INCIDENT = "incident"  # it has served, and is suspect, dead or starting again
    OTHER = "other"  # nobody has said


class Bottleneck(enum.StrEnum):
    """The longest cause of waiting in a step or run; what to tune.

    Docs/failure-modes.md, "A run that is slow".
    """

    TRAINER = "trainer"
    GENERATORS = "generators"
    STALENESS = "staleness"  # trainer and generators wait by turns: the bound keeps them in step
    SYNC = "sync"
    REWARD = "reward"
    INCIDENT = "incident"
    BALANCED = "balanced"


NOTICEABLE: Final = 0.1
"""Share of a step below which no waiting decides the bottleneck."""


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

    @property
    def category(self) -> str:
        return self._category

    def switch(self, category: str) -> None:
        """Time counts for ``category`` from now on."""
        now = self._clock()
        before = self._category
        self._seconds[before] = self._seconds.get(before, 0.0) + (now - self._since)
        self._category, self._since = category, now

    def seconds(self) -> dict[str, float]:
        """Return the seconds since creation, by category.

        The one in progress is counted up to now.
        """
        self.switch(self._category)
        return dict(self._seconds)


class FleetTimeAccount:
    """Attributes the time of many actors, each to one category at a time.

    The seconds by category sum to the time since each actor was added, over all of them. A switch,
    and reading, cost the same for ten actors and for ten thousand.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` never runs backwards; seconds."""
        self._clock = clock
        self._in = dict[str, int]()  # actors, by category
        self._since = dict[str, float]()
        self._seconds = dict[str, float]()

    def add(self, category: str, actors: int = 1) -> None:
        """Time of further actors counts from now on."""
        self._settle(category, self._clock())
        self._in[category] += actors

    def switch(self, before: str, category: str, actors: int = 1) -> None:
        """Time of actors that were in ``before`` counts for ``category`` from now on."""
        now = self._clock()
        self._settle(before, now)
        self._settle(category, now)
        self._in[before] -= actors
        self._in[category] += actors

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all actors together, by category, up to now."""
        now = self._clock()
        for category in self._in:
            self._settle(category, now)
        return dict(self._seconds)

    def _settle(self, category: str, now: float) -> None:
        actors = self._in.setdefault(category, 0)
        spent = actors * (now - self._since.get(category, now))
        self._seconds[category] = self._seconds.get(category, 0.0) + spent
        self._since[category] = now


class StepTimes:
    """Splits the seconds by category among steps, when some are only known later.

    An actor reports now and then how long it computed; until then that time counts for what stands
    beside it in ``together``. A late report is credited to later laps: no lap has less than 0 of
    anything, each sums to the time it took, and all of them together come near the whole.
    """

    def __init__(self, *together: str) -> None:
        """``together``: categories whose sum never falls, the one that may rise late first."""
        self._together = together
        self._given = dict[str, float]()

    def take(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds since the last lap, by category.

        ``seconds`` counts from the beginning.
        """
        lap = {name: value - self._given.get(name, 0.0) for name, value in seconds.items()}
        owed = [name for name in self._together if name in lap]
        excess = -sum(min(0.0, lap[name]) for name in owed)
        for name in owed:
            taken = min(max(0.0, lap[name]), excess)
            lap[name], excess = max(0.0, lap[name]) - taken, excess - taken
        self._given |= {name: self._given.get(name, 0.0) + value for name, value in lap.items()}
        return lap


def fractions(seconds: Mapping[str, float]) -> dict[str, float]:
    """Shares of the whole; zero entries are left out, and no time at all has no shares."""
    total = sum(seconds.values())
    return (
        {name: value / total for name, value in seconds.items() if value > 0} if total > 0 else {}
    )


def verdict(
    trainer: Mapping[str, float],
    generators: Mapping[str, float],
    *,
    generate_s: float = 0.0,
    reward_s: float = 0.0,
) -> Bottleneck:
    """Return the bottleneck of a step, or a run: the cause behind the longest waiting.

    Args:
        trainer: Seconds or shares of it by ``TrainerTime``.
        generators: The same of all engines together, by ``GeneratorTime``.
        generate_s: Time of a group in the engine.
        reward_s: Time of a group in environment and reward. Where the trainer waits for groups and
            this is the longer part of a group's time, the reward is the cause.

    Returns:
        ``BALANCED`` when no waiting takes more than a tenth of the time. Waiting that only follows
        from an incident, or from an operator's pause, is ignored.
    """
    t, g = fractions(trainer), fractions(generators)
    paused = t.get(TrainerTime.WAITING_GATE, 0.0)
    hurt, broken = t.get(TrainerTime.INCIDENT, 0.0), g.get(GeneratorTime.INCIDENT, 0.0)
    slow_rollouts = Bottleneck.REWARD if reward_s > generate_s else Bottleneck.GENERATORS
    for_groups = max(0.0, t.get(TrainerTime.WAITING_GROUPS, 0.0) - broken)
    for_trainer = max(0.0, g.get(GeneratorTime.WAITING_GATE, 0.0) - hurt - paused)
    by_turns = min(for_groups, for_trainer)
    causes = {
        Bottleneck.INCIDENT: max(hurt, broken),
        slow_rollouts: for_groups - by_turns,
        Bottleneck.TRAINER: for_trainer - by_turns,
        Bottleneck.STALENESS: by_turns,
        Bottleneck.SYNC: max(
            t.get(TrainerTime.WAITING_WEIGHTS, 0.0) + t.get(TrainerTime.SYNC, 0.0),
            g.get(GeneratorTime.WAITING_WEIGHTS, 0.0) + g.get(GeneratorTime.SYNC, 0.0),
        ),
    }
    worst = max(causes, key=lambda cause: causes[cause])
    return worst if causes[worst] > NOTICEABLE else Bottleneck.BALANCED


def busy_metrics(trainer: Mapping[str, float], generators: Mapping[str, float]) -> dict[str, float]:
    """The metrics ``busy/*`` of a step, from its seconds or shares by category."""
    t, g = fractions(trainer), fractions(generators)
    return {
        "busy/trainer_fraction": t.get(TrainerTime.COMPUTE, 0.0),
        "busy/generator_fraction": g.get(GeneratorTime.COMPUTE, 0.0),
        "busy/trainer_unattributed_fraction": t.get(TrainerTime.OTHER, 0.0),
        "busy/generator_unattributed_fraction": g.get(GeneratorTime.OTHER, 0.0),
    }
