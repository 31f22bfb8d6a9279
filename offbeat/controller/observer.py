"""Passes what happens in a run to its timeline, its time accounts and the faults of a test."""

import asyncio
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from offbeat.controller import events
from offbeat.controller.engine_record import EngineRecord
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.pending_waits import Pump
from offbeat.controller.ports import Ports
from offbeat.controller.time_attribution import TimeAttribution
from offbeat.messages.groups import RolloutTask
from offbeat.messages.weights import WeightsAck
from offbeat.telemetry.time_accounting import TrainerTime

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
"""Failpoint that is reached when an event has been recorded, by type of event."""


class Observer:
    """Observes the events, waits and calls of a run. It decides nothing and changes no run state.

    Times are of the event loop's clock. Without a trace and failpoints (``NoTrace``,
    ``no_failpoints``) only the time accounts are kept.
    """

    def __init__(self, ports: Ports, engines: Mapping[str, EngineRecord]) -> None:
        """Create it on the event loop of the controller, with the engines to account for."""
        self._clock = asyncio.get_running_loop().time
        self._trace = ports.trace
        self.reached = ports.failpoints
        self.times = TimeAttribution(self._clock, engines)

    def recorded(self, event: type[events.AnyEvent]) -> None:
        """Observe that the ledger has recorded an event of this type."""
        if point := _POINTS.get(event):
            self.reached(point)

    def waited(self, pump: Pump, target: str, since_s: float) -> None:
        """Observe the end of a pump's wait for a change."""
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
        """Count the block as this work of the trainer; it begins at a failpoint."""
        if point is not None:
            self.reached(point)
        with self.times.trainer_in(category):
            yield

    @contextmanager
    def trainer_call(self, waiter: str) -> Generator[None, None, None]:
        """Observe a call of the trainer."""
        since_s = self._clock()
        try:
            with self.times.trainer_in(TrainerTime.COMPUTE):
                yield
        finally:
            self._trace.span(("rank", "0"), waiter, since_s, self._clock())

    # --- engines ---------------------------------------------------------------------------------

    def rolled_out(self, task: RolloutTask, name: str, outcome: str, since_s: float) -> None:
        """Observe the end of a rollout of the group ``name``, which began at ``since_s``."""
        now, attempt = self._clock(), task.attempt
        self._trace.span(("group", name), outcome, since_s, now, attempt=attempt)
        self._trace.span(("engine", task.engine), name, since_s, now, attempt=attempt)

    def synced(self, ack: WeightsAck, since_s: float) -> None:
        """Observe that an engine serves a release whose transfer began at ``since_s``."""
        self.times.paused(ack.pause_s)
        name, pause_s = f"weights v{ack.version}", ack.pause_s
        self._trace.span(("engine", ack.engine), name, since_s, self._clock(), pause_s=pause_s)

    def engine_ended(self, engine: str, what: str, **facts: float) -> None:
        """Observe that a process of an engine was lost, or that the engine was retired."""
        self._trace.mark(("engine", engine), what, self._clock(), **facts)
