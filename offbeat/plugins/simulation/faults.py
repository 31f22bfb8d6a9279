"""Faults of the simulation: target, effect and recovery of each.

A fault fires at once (``FaultMoment.NOW``) or when its target reaches a moment, such as the next
weight load or the next request. A fault counts as fired only if an actor could see its effect.
"""

import enum
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from offbeat.controller.failpoints import Failpoint
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.plugins.simulation.processes import OUTSIDE
from offbeat.plugins.simulation.schedule import PlannedFault


class FaultMoment(enum.Enum):
    """Moment at which a pending fault takes effect."""

    NOW = enum.auto()
    REQUEST = enum.auto()  # a message leaves the controller
    ANSWER = enum.auto()  # a message leaves an actor
    LOAD = enum.auto()  # an engine begins a transfer
    PUBLISH = enum.auto()  # the trainer's ranks compare their weights before they send them
    BUCKET = enum.auto()  # a bucket from a trainer's rank arrives at an engine
    ACK = enum.auto()  # an engine has verified the weights and serves them
    BEGIN = enum.auto()  # calls of the trainer
    MICROBATCH = enum.auto()
    FINISH = enum.auto()
    CHECKPOINT = enum.auto()
    ROLLOUT = enum.auto()  # a worker finished a group
    EMIT = enum.auto()  # the controller emits metrics
    BIRTH = enum.auto()  # the next process of an actor is about to start


class Effect(enum.Enum):
    """Effect that several kinds of faults have on their target."""

    OWN = enum.auto()  # none of these: the kind itself decides
    KILLS = enum.auto()  # the process dies before it has done its call
    FREEZES = enum.auto()  # the process answers nothing
    RAISES = enum.auto()  # the call raises the failure of a living process


class FaultKind(msgspec.Struct, frozen=True):
    """One kind of fault."""

    profile: str
    target: str  # engine | worker | trainer | controller | machine | any | all
    moment: FaultMoment
    shows: str
    heals: str
    effect: Effect = Effect.OWN


def _kinds() -> dict[str, FaultKind]:
    now, load, roll = FaultMoment.NOW, FaultMoment.LOAD, FaultMoment.ROLLOUT
    restart, retry, at_once = "a new process", "the next attempt", "at once"
    kills, freezes, raises = Effect.KILLS, Effect.FREEZES, Effect.RAISES
    return {
        "engine_killed": FaultKind("engines", "engine", now, "its calls raise after 1.4 s", restart, kills),
        "engine_frozen": FaultKind("engines", "engine", now, "it answers nothing", "thawed or replaced", freezes),
        "engine_wedged": FaultKind("engines", "engine", now, "probes answer, rollouts hang", restart),
        "engine_refuses": FaultKind("engines", "engine", now, "its requests fail at once", restart),
        "engine_flaps": FaultKind("engines", "engine", now, "dies after each ack", "retired"),
        "loads_hang": FaultKind("engines", "engine", now, "all its transfers hang", "retired"),
        "engine_slow": FaultKind("engines", "engine", now, "rollouts take ten times as long", "60 s"),
        "engine_born_late": FaultKind("engines", "engine", FaultMoment.BIRTH, "its next start drags", at_once),
        "load_torn": FaultKind("engines", "engine", load, "part of the weights never came", retry),
        "load_wrong_digest": FaultKind("engines", "engine", load, "what came is not what was sent", retry),
        "load_hangs": FaultKind("engines", "engine", load, "no ack, ever", "a newer transfer, or restart"),
        "load_computes_other": FaultKind("engines", "engine", load, "takes the bytes, computes with wrong weights", retry),
        "load_kills": FaultKind("engines", "engine", load, "dies in mid-transfer", restart),
        "ack_lies": FaultKind("engines", "engine", FaultMoment.ACK, "the ack names another digest", retry),
        "ack_lost": FaultKind("engines", "engine", FaultMoment.ACK, "serves, and its ack is lost", retry),
        "ack_doubled": FaultKind("engines", "engine", FaultMoment.ACK, "the ack comes twice", at_once),
        "worker_killed": FaultKind("engines", "worker", now, "its rollouts raise ActorLost", restart, kills),
        "worker_frozen": FaultKind("engines", "worker", now, "its rollouts hang", "thawed after a while", freezes),
        "begin_raises": FaultKind("trainer", "trainer", FaultMoment.BEGIN, "TrainStepFailed", retry, raises),
        "microbatch_raises": FaultKind("trainer", "trainer", FaultMoment.MICROBATCH, "TrainStepFailed", retry, raises),
        "finish_raises": FaultKind("trainer", "trainer", FaultMoment.FINISH, "TrainStepFailed", retry, raises),
        "finish_kills_before": FaultKind("trainer", "trainer", FaultMoment.FINISH, "dies before it stepped", restart, kills),
        "finish_kills_after": FaultKind("trainer", "trainer", FaultMoment.FINISH, "dies once it stepped", restart),
        "gradient_nan": FaultKind("trainer", "trainer", FaultMoment.FINISH, "the step is not applied", "next step"),
        "trainer_killed": FaultKind("trainer", "trainer", now, "its calls raise after 1.4 s", restart, kills),
        "trainer_frozen": FaultKind("trainer", "trainer", now, "it answers nothing", restart, freezes),
        "checkpoint_fails": FaultKind("trainer", "trainer", FaultMoment.CHECKPOINT, "no space: nothing written", retry),
        "checkpoint_kills": FaultKind("trainer", "trainer", FaultMoment.CHECKPOINT, "dies while it writes", restart, kills),
        "checkpoint_untold": FaultKind("trainer", "trainer", FaultMoment.CHECKPOINT, "dies before LATEST moves", restart),
        "controller_killed": FaultKind("controller", "controller", now, "loses its unsynced tail", "next incarnation"),
        "controller_frozen": FaultKind("controller", "controller", now, "silent, then killed", "next incarnation"),
        "cluster_lost": FaultKind("controller", "all", now, "only the run directory is left", "a new cluster"),
        "machine_lost": FaultKind("machines", "machine", now, "all on it is gone at once; told in 90 s at most", restart),
        "machine_cut_off": FaultKind("machines", "machine", now, "silent, then given up with all on it", restart),
        "request_lost": FaultKind("network", "any", FaultMoment.REQUEST, "never arrives", "the caller's deadline"),
        "request_late": FaultKind("network", "any", FaultMoment.REQUEST, "arrives seconds later", at_once),
        "request_doubled": FaultKind("network", "any", FaultMoment.REQUEST, "served twice", at_once),
        "request_reordered": FaultKind("network", "any", FaultMoment.REQUEST, "later ones overtake it", at_once),
        "answer_lost": FaultKind("network", "any", FaultMoment.ANSWER, "never arrives", "the caller's deadline"),
        "answer_late": FaultKind("network", "any", FaultMoment.ANSWER, "arrives seconds later", at_once),
        "partition": FaultKind("network", "engine", now, "no message passes", "30 s"),
        "rank_killed": FaultKind("trainer", "any", FaultMoment.BUCKET, "a rank dies while it sends a bucket", "other holders, or new ranks"),
        "rank_frozen": FaultKind("trainer", "any", FaultMoment.BUCKET, "a rank hangs while it sends a bucket", "other holders; thawed or replaced", freezes),
        "copies_diverge": FaultKind("trainer", "trainer", FaultMoment.PUBLISH, "ranks hold the same weights with other values", "the run ends: ReplicasDiverged"),
        "fetch_kills": FaultKind("engines", "engine", FaultMoment.BUCKET, "dies between two buckets", restart),
        "bucket_lost": FaultKind("network", "engine", FaultMoment.BUCKET, "a bucket never arrives", "other holders, or the next sync"),
        "bucket_late": FaultKind("network", "engine", FaultMoment.BUCKET, "a bucket arrives seconds later", "the same"),
        "bucket_corrupted": FaultKind("network", "engine", FaultMoment.BUCKET, "a bucket has other bytes", "the same"),
        "bucket_doubled": FaultKind("network", "engine", FaultMoment.BUCKET, "a bucket comes twice", at_once),
        "outage": FaultKind("data", "all", now, "every environment fails for want of a service", "it is back"),
        "prompt_hangs": FaultKind("data", "all", now, "a prompt never ends on any engine", "it is dropped"),
        "prompt_kills": FaultKind("data", "all", now, "a prompt kills each engine it is sent to", "it is dropped"),
        "reward_nan": FaultKind("data", "worker", roll, "a reward is NaN", retry),
        "reward_raises": FaultKind("data", "worker", roll, "RolloutFailed, by the data or its pictures", retry),
        "group_short": FaultKind("data", "worker", roll, "a sample is missing", retry),
        "group_ragged": FaultKind("data", "worker", roll, "columns of different length", retry),
        "sample_doubled": FaultKind("data", "worker", roll, "a sample too many", retry),
        "sample_empty": FaultKind("data", "worker", roll, "a sample without tokens", retry),
        "version_future": FaultKind("data", "worker", roll, "a token of weights not made yet", retry),
        "attempt_wrong": FaultKind("data", "worker", roll, "the answer of another attempt", retry),
        "spans_short": FaultKind("data", "worker", roll, "versions for some tokens only", retry),
        "rollout_hangs": FaultKind("data", "worker", roll, "no answer", "the caller's deadline"),
        "sink_drops": FaultKind("data", "controller", FaultMoment.EMIT, "a step's metrics are lost", at_once),
    }  # fmt: skip


KINDS: Final[Mapping[str, FaultKind]] = MappingProxyType(_kinds())
PROFILES: Final = ("none", "engines", "trainer", "machines", "controller", "network", "data", "all")
OUTAGE: Final = "outage"
POISON: Final = ("prompt_hangs", "prompt_kills")
MACHINES: Final = ("machine_lost", "machine_cut_off")
OF_RESHARD: Final = tuple(
    name for name, kind in KINDS.items() if kind.moment in (FaultMoment.PUBLISH, FaultMoment.BUCKET)
)
"""Faults that exist only with ``sync.transport: reshard``."""
ENDS_RUN: Final = frozenset({"copies_diverge"})
"""Faults that a run does not survive, by design."""
FREE: Final = frozenset({"engine_killed", "engine_frozen", "trainer_killed", "controller_killed"})
"""Faults that may fire at a failpoint."""


def effect_of(kind: str) -> Effect:
    """Return the effect of a kind of fault, or ``OWN`` for the empty name of no fault."""
    return KINDS[kind].effect if kind else Effect.OWN


class Faults:
    """Faults of one episode: planned, pending, fired."""

    def __init__(
        self,
        planned_faults: Sequence[PlannedFault],
        loop: VirtualLoop,
        on_fired: Callable[[str, str, str], None],
    ) -> None:
        self._loop, self._on_fired = loop, on_fired
        self._steps = sorted(
            [s for s in planned_faults if s.at_step is not None], key=lambda s: s.at_step or 0
        )
        self._records = sorted(
            [s for s in planned_faults if s.at_record is not None], key=lambda s: s.at_record or 0
        )
        self._points: dict[str, list[PlannedFault]] = {}
        for strike in planned_faults:
            if strike.failpoint is not None:
                self._points.setdefault(strike.failpoint, []).append(strike)
        self._waiting: dict[FaultMoment, list[PlannedFault]] = {}
        self._reached: dict[str, int] = {}
        self.strike: Callable[[str, str], bool] = lambda _kind, _target: False
        """Applies a fault of ``FaultMoment.NOW``. It returns False if its target does not exist."""
        self.fired: list[str] = []
        self.struck: list[str] = []  # failpoints at which a fault had an effect

    @property
    def reached(self) -> list[str]:
        """Failpoints, in the order they were first reached."""
        return list(self._reached)

    def at(self, moment: FaultMoment, target: str, peer: str = "") -> str:
        """Return the name of the fault that fires here and now, or an empty string.

        Args:
            moment: The event.
            target: The actor of the event. The record of a fault names it as the target.
            peer: The other side of a transfer. A fault may be planned for it instead. It is the
                detail of the record.
        """
        if not self._waiting or (waiting := self._waiting.get(moment)) is None:
            return ""
        for place, strike in enumerate(waiting):
            if strike.target in ("", target, peer):
                del waiting[place]
                if not waiting:
                    del self._waiting[moment]
                self.has_fired(strike.action, target, peer)
                return strike.action
        return ""

    def has_fired(self, kind: str, target: str, detail: str) -> None:
        self.fired.append(kind)
        self._on_fired(kind, target, detail)

    def step(self, applied: int) -> None:
        """Handle that the trainer has applied this many steps."""
        while self._steps and (self._steps[0].at_step or 0) <= applied:
            self._release(self._steps.pop(0))

    def failpoint(self, point: Failpoint) -> None:
        """Handle that the controller reached a failpoint.

        A process killed there is dead on return.
        """
        count = self._reached[point] = self._reached.get(point, 0) + 1
        for strike in self._points.get(point, ()):
            if strike.nth == count:
                self._release(strike)

    def record(self, count: int) -> None:
        """Handle that the controller has written this many journal records."""
        while self._records and (self._records[0].at_record or 0) <= count:
            self._release(self._records.pop(0))

    def _release(self, strike: PlannedFault) -> None:
        if strike.delay_s:
            self._loop.run_in(strike.delay_s, OUTSIDE, self._arm, strike)
        else:
            self._arm(strike)

    def _arm(self, strike: PlannedFault) -> None:
        kind = KINDS[strike.action]
        if kind.moment is not FaultMoment.NOW:
            self._waiting.setdefault(kind.moment, []).append(strike)
        elif self.strike(strike.action, strike.target):
            point = strike.failpoint or ""
            self.has_fired(strike.action, strike.target, point and f"at {point}")
            self.struck += [point] if point else []


def draw_faults(
    rng: random.Random, profile: str, *, steps: int, engines: int, workers: int
) -> list[PlannedFault]:
    """Draw the faults of one episode. The last steps have none, so that the episode can end."""
    if profile == "none":
        return []
    # These are drawn separately
    apart = {*MACHINES, *POISON, OUTAGE, *OF_RESHARD}
    drawn = [name for name in KINDS if name not in apart]
    names = [name for name in drawn if profile in ("all", KINDS[name].profile)]
    if not names:
        return []
    victims = {
        "engine": [f"generator-{index}" for index in range(engines)],
        "worker": [f"environment-{index}" for index in range(workers)],
        "trainer": ["trainer"],
        "controller": ["controller"],
        "all": [""],
    }
    victims["any"] = [*victims["engine"], *victims["trainer"], *victims["worker"], ""]
    free = [name for name in names if name in FREE]
    points = [point for point in Failpoint if point is not Failpoint.UNDOING]  # drawn separately
    planned_faults = list[PlannedFault]()
    for _ in range(rng.randint(3, 6)):
        if free and rng.random() < 0.2:  # noqa: PLR2004 - a fifth waits for a failpoint
            name, point = rng.choice(free), rng.choice(points)
            target = rng.choice(victims[KINDS[name].target])
            planned_faults.append(
                PlannedFault(name, target, failpoint=point, nth=rng.choice((1, 1, 2, 5, 20)))
            )
            continue
        name = rng.choice(names)
        target = rng.choice(victims[KINDS[name].target])
        step = rng.randint(0, max(0, steps - 4))
        delay_s = round(rng.uniform(0.0, 4.0), 3) if rng.random() < 0.7 else 0.0  # noqa: PLR2004
        planned_faults.append(PlannedFault(name, target, at_step=step, delay_s=delay_s))
    return planned_faults


STEP_END: Final = (
    Failpoint.FINISH_ANSWERED,
    Failpoint.APPLIED,
    Failpoint.APPLIED_DURABLE,
    Failpoint.CLEARED,
)
"""Failpoints between the trainer's reply to a step and its consequences."""


def draw_step_end_crash(rng: random.Random, *, steps: int) -> PlannedFault:
    """Draw a kill of the controller at the end of some step, more often late in the run.

    The effect of lost state appears late, because the run continues as long as it has room for new
    prompts.
    """
    earliest = rng.choice((1, steps // 2, max(1, steps - 4)))
    nth = rng.randint(earliest, steps - 1)
    return PlannedFault("controller_killed", "controller", failpoint=rng.choice(STEP_END), nth=nth)


def draw_rewind_crash(rng: random.Random, profile: str) -> list[PlannedFault]:
    """Draw a kill of the controller between two parts of a rewind, in one episode of five."""
    if profile not in ("all", "controller") or rng.random() >= 0.2:  # noqa: PLR2004
        return []
    nth = rng.choice((1, 1, 2))
    return [PlannedFault("controller_killed", "controller", failpoint=Failpoint.UNDOING, nth=nth)]


def draw_poison(rng: random.Random, profile: str, *, steps: int) -> list[PlannedFault]:
    """Draw one or two poison prompts in 10 % of episodes, or 40 % for data faults."""
    chance = {"all": 0.1, "data": 0.4}.get(profile, 0.0)
    if rng.random() >= chance:
        return []
    at_steps = [rng.randint(0, max(0, steps - 6)) for _ in range(rng.randint(1, 2))]
    return [PlannedFault(rng.choice(POISON), "", at_step=at_step) for at_step in at_steps]


def draw_outage(rng: random.Random, profile: str, *, steps: int) -> list[PlannedFault]:
    """Draw an outage of all environments in 10 % of episodes, or 40 % for data faults."""
    chance = {"all": 0.1, "data": 0.4}.get(profile, 0.0)
    if rng.random() >= chance:
        return []
    at_step, delay_s = rng.randint(0, max(0, steps - 4)), round(rng.uniform(0.0, 2.0), 3)
    return [PlannedFault(OUTAGE, "", at_step=at_step, delay_s=delay_s)]


def draw_machine_faults(
    rng: random.Random, profile: str, *, steps: int, machines: Mapping[str, str]
) -> list[PlannedFault]:
    """Draw lost machines, in 40 % of episodes or in all episodes of the profile ``machines``."""
    names = sorted(set(machines.values()))
    if not names or profile not in ("machines", "all"):
        return []
    count = rng.randint(1, 2) if profile == "machines" else int(rng.random() < 0.4)  # noqa: PLR2004
    return [
        PlannedFault(
            rng.choice(MACHINES),
            rng.choice(names),
            at_step=rng.randint(0, max(0, steps - 4)),
            delay_s=round(rng.uniform(0.0, 2.0), 3),
        )
        for _ in range(count)
    ]


def draw_reshard_faults(
    rng: random.Random, profile: str, *, steps: int, engines: int
) -> list[PlannedFault]:
    """Draw one to three faults of fetches. Diverged copies end few of the episodes."""
    names = [
        name
        for name in OF_RESHARD
        if name not in ENDS_RUN and profile in ("all", KINDS[name].profile)
    ]
    if not names:
        return []
    victims = ["", *(f"generator-{index}" for index in range(engines))]
    planned_faults = list[PlannedFault]()
    for _ in range(rng.randint(1, 3)):
        at_step, delay_s = rng.randint(0, max(0, steps - 4)), round(rng.uniform(0.0, 4.0), 3)
        name, target = rng.choice(names), rng.choice(victims)
        planned_faults.append(PlannedFault(name, target, at_step=at_step, delay_s=delay_s))
    if profile in ("all", "trainer") and rng.random() < 0.05:  # noqa: PLR2004
        planned_faults.append(PlannedFault("copies_diverge", "trainer", at_step=steps // 2))
    return planned_faults
