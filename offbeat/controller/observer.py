"""Passes the events of a run to its timeline, its time accounts and the faults of a test.

Attributes the time of trainer and engines to their work or to the cause of a wait.

Most time is attributed as soon as the controller observes an event. Two kinds are split later, by
the actors' reports of how long they computed: the time of an open trainer call, into compute and
call overhead; and the time in which an engine had groups, into compute, sync and episodes
(environment, reward, transport).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from offbeat.controller import events
from offbeat.controller.engine_record import EngineRecord, Health
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.pending_waits import Pump
from offbeat.controller.ports import Ports
from offbeat.messages.groups import RolloutTask
from offbeat.messages.weights import WeightsAck
from offbeat.telemetry.time_accounting import (
    FleetTimeAccount,
    GeneratorTime,
    StepTimes,
    TimeAccount,
    TrainerTime,
    serving_shares,
)

_OUT = GeneratorTime.COMPUTE  # groups are out, until an engine reports its decoding time
_ROUNDING: Final = 1e-3  # of a lap: accounts are read one after the other
_WORK: Final = (
    TrainerTime.INCIDENT,
    TrainerTime.CHECKPOINT,
    TrainerTime.SYNC,
    TrainerTime.COMPUTE,  # a call is open
)
"""Work of the trainer that the controller observes, by rank."""
_INCIDENTS = (Health.SUSPECT, Health.DEAD, Health.RESTARTING, Health.RETIRED)


@dataclass(slots=True)
class _Seen:
    """The time attribution of one engine. Times are seconds on the controller's clock."""

    category: GeneratorTime | None  # None while it is without work: the fleet knows for what
    since: float
    busy_s: float  # as last reported
    served: bool = False  # it has been HEALTHY
    syncing: bool = False
    out_s: float = 0.0  # with groups out, since the last report
    evaluation_s: float = 0.0  # likewise


class TimeAttribution:
    """Time accounts of the trainer and of the whole fleet, since their creation.

    ``trainer_seconds`` sums to the time since then, and ``engine_seconds`` to that time multiplied
    by the number of engines. The cost of a change does not depend on the number of engines.
    """

    def __init__(self, clock: Callable[[], float], engines: Mapping[str, EngineRecord]) -> None:
        self._clock = clock
        self._trainer = TimeAccount(clock, TrainerTime.STARTING)
        self._idle: TrainerTime = TrainerTime.STARTING
        self._trainer_compute_s = 0.0
        self._blocks = Counter[TrainerTime]()  # open ones
        self._fleet = FleetTimeAccount(clock)
        self._engines_wait: GeneratorTime = GeneratorTime.WAITING_GATE
        self._without_work = 0
        self._engine_compute_s = self._paused_s = self._sync_out_s = 0.0
        self._seen = dict[str, _Seen]()
        for engine in engines.values():
            self._know(engine)
        self._trainer_laps = StepTimes(TrainerTime.COMPUTE, TrainerTime.CALLS)
        self._engine_laps = StepTimes(
            GeneratorTime.COMPUTE, GeneratorTime.SYNC, GeneratorTime.EPISODES
        )
        self._lap_at = clock()

    # --- the trainer -----------------------------------------------------------------------------

    def trainer_waits(self, category: TrainerTime) -> None:
        """Set the category of the time in which no call to the trainer is open.

        Before the first call of this method, the trainer counts as starting.
        """
        self._idle = category
        self._judge()

    def add_computing(self, compute_s: float) -> None:
        """Add the time that the trainer reports to have computed in a step."""
        self._trainer_compute_s += compute_s

    @contextmanager
    def trainer_in(self, category: TrainerTime) -> Generator[None, None, None]:
        """Count the duration of the block as this kind of trainer work, one of ``_WORK``.

        Blocks may overlap. Time counts for the open category that is first in ``_WORK``.
        """
        self._blocks[category] += 1
        self._judge()
        try:
            yield
        finally:
            self._blocks[category] -= 1
            self._judge()

    def trainer_seconds(self) -> dict[str, float]:
        seconds = self._trainer.seconds()
        open_s = seconds.get(TrainerTime.COMPUTE, 0.0)
        compute_s = min(open_s, self._trainer_compute_s)
        return {
            **seconds,
            TrainerTime.COMPUTE: compute_s,
            TrainerTime.CALLS: seconds.get(TrainerTime.CALLS, 0.0) + open_s - compute_s,
        }

    def _judge(self) -> None:
        """Select the category. A trainer that starts counts as starting, except in an incident."""
        if self._idle is TrainerTime.STARTING and not self._blocks[TrainerTime.INCIDENT]:
            category = TrainerTime.STARTING
        else:
            category = next((each for each in _WORK if self._blocks[each]), self._idle)
        if category != self._trainer.category:
            self._trainer.switch(category)

    # --- engines ---------------------------------------------------------------------------------

    def engine_changed(self, engine: EngineRecord) -> None:
        """Process a change of an engine's health, outstanding groups, pin or report."""
        seen = self._seen.get(engine.name) or self._know(engine)
        self._settle(seen)
        if engine.busy_s != seen.busy_s:
            self._attribute_report(seen, engine.busy_s)
        seen.served = seen.served or engine.health is Health.HEALTHY
        self._enter(seen, _category(engine, seen))

    def engines_wait(self, category: GeneratorTime) -> None:
        """Set the wait category, from now on, of engines that serve and have no groups out.

        The default is the gate. While a sync drains the fleet, it is weights.
        """
        if category is not self._engines_wait:
            self._fleet.switch(self._engines_wait, category, self._without_work)
            self._engines_wait = category

    @contextmanager
    def syncing(self, engine: EngineRecord) -> Generator[None, None, None]:
        """Count the block as a weight sync of this engine, even if it continues with its groups."""
        seen = self._seen.get(engine.name) or self._know(engine)
        self._settle(seen)
        seen.syncing = True
        self.engine_changed(engine)
        try:
            yield
        finally:
            self._settle(seen)
            seen.syncing = False
            self.engine_changed(engine)

    def paused(self, pause_s: float) -> None:
        """Add the time that an engine reports to have paused for a weight sync.

        The pause counts only in ``syncing`` time in which the engine has groups out. Without
        groups, all of that time counts as sync anyway.
        """
        self._paused_s += pause_s

    def engine_seconds(self) -> dict[str, float]:
        """Return the seconds by category, summed over all engines."""
        seconds = self._fleet.seconds()
        out_s = seconds.get(_OUT, 0.0)
        compute_s = min(out_s, self._engine_compute_s)
        paused_s = min(out_s - compute_s, self._paused_s, self._sync_out_s)
        return {
            **seconds,
            GeneratorTime.COMPUTE: compute_s,
            GeneratorTime.SYNC: seconds.get(GeneratorTime.SYNC, 0.0) + paused_s,
            GeneratorTime.EPISODES: seconds.get(GeneratorTime.EPISODES, 0.0)
            + out_s
            - compute_s
            - paused_s,
        }

    def _know(self, engine: EngineRecord) -> _Seen:
        seen = _Seen(GeneratorTime.STARTING, self._clock(), engine.busy_s)
        self._seen[engine.name] = seen
        self._fleet.add(GeneratorTime.STARTING)
        return seen

    def _settle(self, seen: _Seen) -> None:
        """Attribute the engine's time until now."""
        now = self._clock()
        spent_s, seen.since = now - seen.since, now
        if seen.category is _OUT:
            seen.out_s += spent_s
            self._sync_out_s += spent_s if seen.syncing else 0.0
        elif seen.category is GeneratorTime.EVALUATION:
            seen.evaluation_s += spent_s

    def _attribute_report(self, seen: _Seen, busy_s: float) -> None:
        """Divide the decoding time since the last report between training and evaluation."""
        known_s = seen.out_s + seen.evaluation_s
        share = seen.out_s / known_s if known_s else 1.0
        self._engine_compute_s += (busy_s - seen.busy_s) * share
        seen.busy_s, seen.out_s, seen.evaluation_s = busy_s, 0.0, 0.0

    def _enter(self, seen: _Seen, category: GeneratorTime | None) -> None:
        if category is not seen.category:
            self._without_work += (category is None) - (seen.category is None)
            self._fleet.switch(seen.category or self._engines_wait, category or self._engines_wait)
            seen.category = category

    # --- both ------------------------------------------------------------------------------------

    def lap(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of trainer and engines since the last call, or creation.

        Time that no account attributes is OTHER. There is no such time unless an account is wrong.
        """
        trainer = self._trainer_laps.take(self.trainer_seconds())
        engines = self._engine_laps.take(self.engine_seconds())
        now = self._clock()
        elapsed_s, self._lap_at = now - self._lap_at, now
        return (
            {**trainer, **_find_unattributed(trainer, elapsed_s)},
            {**engines, **_find_unattributed(engines, elapsed_s * len(self._seen))},
        )

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the shares of trainer and engines since the first served weights.

        Each of the two mappings sums to 1.
        """
        return serving_shares(self.trainer_seconds(), self.engine_seconds())


def _find_unattributed(seconds: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Return the time that an account leaves unattributed, or nothing if it is only rounding."""
    left_s = elapsed_s - sum(seconds.values())
    return {GeneratorTime.OTHER: left_s} if left_s > _ROUNDING * elapsed_s else {}


def _category(engine: EngineRecord, seen: _Seen) -> GeneratorTime | None:
    """Return the category of the engine's time, or None if it serves and has no work."""
    if not seen.served:
        return GeneratorTime.STARTING
    if engine.health in _INCIDENTS:
        return GeneratorTime.INCIDENT
    if engine.pinned:
        return GeneratorTime.EVALUATION
    if engine.outstanding:
        return _OUT
    if seen.syncing:
        return GeneratorTime.SYNC
    return GeneratorTime.WAITING_WEIGHTS if engine.health is Health.STALE else None


_POINTS: Final[Mapping[type[events.AnyEvent], Failpoint]] = {
    events.Admitted: Failpoint.ADMITTED,
    events.Dispatched: Failpoint.DISPATCHED,
    events.Committed: Failpoint.COMMITTED,
    events.Claimed: Failpoint.CLAIMED,
    events.StepIntent: Failpoint.INTENDED,
    events.StepApplied: Failpoint.APPLIED,
    events.StepRefused: Failpoint.APPLIED,
    events.Released: Failpoint.PUBLISHED,
    events.Served: Failpoint.ACKED,
    events.Checkpointed: Failpoint.CHECKPOINTED,
}
"""Failpoint to reach after an event has been recorded, by type of event."""


class Observer:
    """Observes the events, waits and calls of a run. It decides nothing and changes no run state.

    Times are seconds on the event loop's clock. With ``NoTrace`` and ``no_failpoints``, it keeps
    only the time accounts.
    """

    def __init__(self, ports: Ports, engines: Mapping[str, EngineRecord]) -> None:
        """Create the observer of these engines, on the event loop of the controller."""
        self._clock = asyncio.get_running_loop().time
        self._trace = ports.trace
        self.reached = ports.failpoints
        self.times = TimeAttribution(self._clock, engines)

    def recorded(self, event: type[events.AnyEvent]) -> None:
        """Note that the ledger has recorded an event of this type."""
        if point := _POINTS.get(event):
            self.reached(point)

    def waited(self, pump: Pump, target: str, since_s: float) -> None:
        """Note the end of a pump's wait for a change."""
        self._trace.span(("pump", pump), target, since_s, self._clock())

    # --- the trainer -----------------------------------------------------------------------------

    @contextmanager
    def trainer_waits(self, category: TrainerTime) -> Generator[None, None, None]:
        """Count the time without a call to the trainer as a wait of this category."""
        self.times.trainer_waits(category)
        try:
            yield
        finally:
            self.times.trainer_waits(TrainerTime.CONTROLLER)

    @contextmanager
    def trainer_in(
        self, category: TrainerTime, point: Failpoint | None = None
    ) -> Generator[None, None, None]:
        """Count the duration of the block as this kind of trainer work. Begin at a failpoint."""
        if point is not None:
            self.reached(point)
        with self.times.trainer_in(category):
            yield

    @contextmanager
    def trainer_call(self, waiter: str) -> Generator[None, None, None]:
        """Trace the block as a call of the trainer."""
        since_s = self._clock()
        try:
            with self.times.trainer_in(TrainerTime.COMPUTE):
                yield
        finally:
            self._trace.span(("rank", "0"), waiter, since_s, self._clock())

    # --- engines ---------------------------------------------------------------------------------

    def rolled_out(self, task: RolloutTask, name: str, outcome: str, since_s: float) -> None:
        """Note the end of a rollout of the group ``name`` that began at ``since_s``."""
        now, attempt = self._clock(), task.attempt
        self._trace.span(("group", name), outcome, since_s, now, attempt=attempt)
        self._trace.span(("engine", task.engine), name, since_s, now, attempt=attempt)

    def synced(self, ack: WeightsAck, since_s: float) -> None:
        """Note that an engine serves a release, after a transfer that began at ``since_s``."""
        self.times.paused(ack.pause_s)
        name, pause_s = f"weights v{ack.version}", ack.pause_s
        self._trace.span(("engine", ack.engine), name, since_s, self._clock(), pause_s=pause_s)

    def engine_ended(self, engine: str, what: str, **facts: float) -> None:
        """Note that a process of an engine was lost, or that the engine was retired."""
        self._trace.mark(("engine", engine), what, self._clock(), **facts)
