"""Attributes the time of actors: every moment belongs to exactly one category.

Pure, except that it reads a clock.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Final

from offbeat.config.environment_traits import find_traits
from offbeat.doors import PluginUnusable

_EPISODE_DEADLINE: Final = "environment.episode_deadline_s"


class TrainerTime(enum.StrEnum):
    """Categories of a trainer's time: its work, or the reason why it waits."""

    STARTING = "starting"
    COMPUTE = "compute"
    CALLS = "calls"  # a call or its payload is in transit
    CONTROLLER = "controller"  # between two calls: advantages, ledger, journal
    WAITING_GROUPS = "waiting_groups"
    WAITING_WEIGHTS = "waiting_weights"  # waiting while generators receive the trainer's weights
    WAITING_GATE = "waiting_gate"  # an operator paused the run
    SYNC = "sync"  # publishing the trainer's weights
    CHECKPOINT = "checkpoint"
    INCIDENT = "incident"  # a step is aborted, the trainer replaced, or the run rewound
    OTHER = "other"  # unattributed


class GeneratorTime(enum.StrEnum):
    """Categories of an engine's time: its work, or the reason why it waits."""

    STARTING = "starting"
    COMPUTE = "compute"
    EPISODES = "episodes"  # groups are in environment, reward or transit
    WAITING_GATE = "waiting_gate"  # nothing may be admitted: the trainer is behind
    WAITING_WEIGHTS = "waiting_weights"  # not serving before a sync
    SYNC = "sync"  # receiving weights
    EVALUATION = "evaluation"
    INCIDENT = "incident"  # suspect, dead or restarting after it has served
    OTHER = "other"  # unattributed


TRAINER_LABELS: Final[Mapping[str, str]] = {
    TrainerTime.CALLS: "sending data",
    TrainerTime.CONTROLLER: "between calls",
    TrainerTime.WAITING_GROUPS: "waiting for groups",
    TrainerTime.WAITING_WEIGHTS: "waiting for engines to load",
    TrainerTime.WAITING_GATE: "paused",
    TrainerTime.SYNC: "publishing weights",
    TrainerTime.CHECKPOINT: "saving a checkpoint",
    TrainerTime.OTHER: "unattributed",
}
"""Names for people of a trainer's time categories, if they differ from the category."""

GENERATOR_LABELS: Final[Mapping[str, str]] = {
    GeneratorTime.EPISODES: "waiting for rewards",
    GeneratorTime.WAITING_GATE: "waiting for the trainer",
    GeneratorTime.WAITING_WEIGHTS: "waiting for weights",
    GeneratorTime.SYNC: "loading weights",
    GeneratorTime.OTHER: "unattributed",
}
"""Names for people of an engine's time categories, if they differ from the category."""


class Bottleneck(enum.StrEnum):
    """The longest cause of waiting in a step or run: the first thing to tune.

    See docs/failure-modes.md, "A run that is slow".
    """

    TRAINER = "trainer"
    GENERATORS = "generators"
    # Trainer and generators wait in turns because of the staleness bound
    STALENESS = "staleness"
    SYNC = "sync"
    REWARD = "reward"
    INCIDENT = "incident"
    BALANCED = "balanced"


NOTICEABLE: Final = 0.25
"""Maximum share of waiting that does not yet count as a bottleneck."""


class TimeAccount:
    """Attributes the time of one actor since its creation, to one category at a time.

    At any moment the seconds by category sum to the time since creation.
    """

    def __init__(self, clock: Callable[[], float], category: str = "starting") -> None:
        """``clock`` returns seconds and never runs backwards."""
        self._clock = clock
        self._category = category
        self._since = clock()
        self._seconds = dict[str, float]()

    @property
    def category(self) -> str:
        return self._category

    def switch(self, category: str) -> None:
        """Count time for ``category`` from now on."""
        now = self._clock()
        before = self._category
        self._seconds[before] = self._seconds.get(before, 0.0) + (now - self._since)
        self._category, self._since = category, now

    def seconds(self) -> dict[str, float]:
        """Return the seconds since creation by category, the current one up to now."""
        self.switch(self._category)
        return dict(self._seconds)


class FleetTimeAccount:
    """Attributes the time of many actors, each to one category at a time.

    The seconds by category sum to the time since each actor was added, summed over all actors. The
    cost of a switch and of reading does not depend on the number of actors.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns seconds and never runs backwards."""
        self._clock = clock
        self._in = dict[str, int]()  # actors by category
        self._since = dict[str, float]()
        self._seconds = dict[str, float]()

    def add(self, category: str, actors: int = 1) -> None:
        """Count the time of further actors from now on."""
        self._settle(category, self._clock())
        self._in[category] += actors

    def switch(self, before: str, category: str, actors: int = 1) -> None:
        """Move actors from category ``before`` to ``category``."""
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
    """Splits the seconds by category among steps, although some are known only later.

    An actor occasionally reports how long it computed. Until the report, this time counts for the
    other categories in ``together``. If the report comes late, the time is moved in later steps. In
    each step, no category is negative and all of them sum to the step's duration. Over all steps
    the split is approximately right.
    """

    def __init__(self, *together: str) -> None:
        """Create the splitter.

        ``together`` lists categories whose sum never falls. The one that is reported late comes
        first.
        """
        self._together = together
        self._given = dict[str, float]()

    def take(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds by category since the last call.

        ``seconds`` counts from the beginning.
        """
        lap = {name: value - self._given.get(name, 0.0) for name, value in seconds.items()}
        owed = [name for name in self._together if name in lap]
        excess = -sum(min(0.0, lap[name]) for name in owed)
        for name in owed:
            moved = min(max(0.0, lap[name]), excess)
            lap[name], excess = max(0.0, lap[name]) - moved, excess - moved
        self._given |= {name: self._given.get(name, 0.0) + value for name, value in lap.items()}
        return lap


def fractions(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return shares of the total, without zero entries. Return none if the total is 0."""
    total = sum(seconds.values())
    return (
        {name: value / total for name, value in seconds.items() if value > 0} if total > 0 else {}
    )


def serving_shares(
    trainer: Mapping[str, float], engines: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the time shares of trainer and engines, without their starts. Each sums to 1."""
    return (
        fractions({k: v for k, v in trainer.items() if k != TrainerTime.STARTING}),
        fractions({k: v for k, v in engines.items() if k != GeneratorTime.STARTING}),
    )


def verdict(
    trainer: Mapping[str, float],
    generators: Mapping[str, float],
    *,
    generate_s: float = 0.0,
    reward_s: float = 0.0,
) -> Bottleneck:
    """Return the bottleneck of a step or run: the cause of the longest wait.

    Args:
        trainer: Seconds or shares by ``TrainerTime``.
        generators: Seconds or shares of all engines together, by ``GeneratorTime``.
        generate_s: Seconds that a group spends in the engine.
        reward_s: Seconds that a group spends in environment and reward. The reward is the cause in
            two cases: the trainer waits for groups and ``reward_s`` exceeds ``generate_s``; or,
            while groups are out, engines are idle for longer than they compute.

    Returns:
        ``BALANCED`` if no wait exceeds a quarter of the time. Waiting that follows from an
        incident, or from an operator's pause, is ignored.
    """
    t, g = fractions(trainer), fractions(generators)
    paused = t.get(TrainerTime.WAITING_GATE, 0.0)
    hurt, broken = t.get(TrainerTime.INCIDENT, 0.0), g.get(GeneratorTime.INCIDENT, 0.0)
    engines_wait = g.get(GeneratorTime.EPISODES, 0.0) > g.get(GeneratorTime.COMPUTE, 0.0)
    is_reward = reward_s > generate_s or engines_wait
    slow_rollouts = Bottleneck.REWARD if is_reward else Bottleneck.GENERATORS
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


def tuning(bottleneck: str, recipe: Mapping[str, object]) -> list[str]:
    """Return changes that may shorten the waiting and that the recipe does not have yet.

    Args:
        bottleneck: A ``Bottleneck``. For any other text there are no changes.
        recipe: All values of the run's ``config.yaml`` by dotted key.
    """

    def more(*keys: str) -> list[str]:
        return [f"more {key}" for key in keys if key in recipe]

    match bottleneck:
        case Bottleneck.GENERATORS:
            return [*more("generator.engines", "generator.threads"), "shorter answers"]
        case Bottleneck.REWARD:
            workers = more("environment.reward_workers", "environment.workers")
            return [*_hasten_rewards(recipe), *workers]
        case Bottleneck.TRAINER:
            threads = more("trainer.threads") if recipe.get("trainer.device") == "cpu" else []
            return [*more("trainer.data_parallel"), *threads, "fewer samples per step"]
        case Bottleneck.STALENESS:
            return ["a higher sampler.max_staleness, if the reward allows it"]
        case Bottleneck.SYNC:
            interval, bound = recipe.get("sync.interval"), recipe.get("sampler.max_staleness")
            is_allowed = isinstance(interval, int) and isinstance(bound, int) and interval <= bound
            return [
                *(["a larger sync.interval"] if is_allowed else []),
                *(["sync.mode=keep"] if recipe.get("sync.mode") == "drain" else []),
                "another sync.transport",
            ]
        case _:
            return ["see logs/controller.log"] if bottleneck == Bottleneck.INCIDENT else []


def _hasten_rewards(recipe: Mapping[str, object]) -> list[str]:
    """Return changes for faster rewards, or for faster episodes of an agent."""
    try:
        is_agent = find_traits(str(recipe.get("environment.name"))).is_agent
    except PluginUnusable:
        is_agent = False
    if not is_agent:
        return ["a cheaper reward"]
    is_limited = recipe.get(_EPISODE_DEADLINE) is not None
    limit = (
        f"a lower {_EPISODE_DEADLINE}" if is_limited else f"{_EPISODE_DEADLINE} if episodes hang"
    )
    return [limit, "faster episodes"]


def busy_metrics(trainer: Mapping[str, float], generators: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics ``busy/*`` of a step, from its seconds or shares by category."""
    t, g = fractions(trainer), fractions(generators)
    return {
        "busy/trainer_fraction": t.get(TrainerTime.COMPUTE, 0.0),
        "busy/generator_fraction": g.get(GeneratorTime.COMPUTE, 0.0),
        "busy/trainer_unattributed_fraction": t.get(TrainerTime.OTHER, 0.0),
        "busy/generator_unattributed_fraction": g.get(GeneratorTime.OTHER, 0.0),
    }
