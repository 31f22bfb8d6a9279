"""Audit of lost environment workers, by the journal and by the workers' own records: I23."""

from collections import defaultdict
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.controller.events import Dispatched, Joined, Opened, Returned, WorkerLost
from offbeat.messages.failures import WORKER_LOST, Component
from offbeat.plugins.simulation.audit_world import AuditTable, Findings, World
from offbeat.plugins.simulation.faults import KINDS
from offbeat.plugins.simulation.records import WorkerDied, WorkerStarted


class AuditedWorkers(AuditTable):
    """Worker processes that the journal counts as present, and the ones it counts as lost."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._started = defaultdict[str, set[str]](set)
        self._mortal = set[str]()  # workers that had a process die
        self._driver: str | None = None
        self._present = dict[str, str]()  # last joined process of each worker
        self._lost = set[str]()
        self._moves = 0  # dispatches, losses and returns of workers so far
        self._changed_at = 0  # the last of these moves that was about a worker
        self._dispatched_at = dict[int, int]()

    def on_started(self, record: WorkerStarted) -> None:
        self._started[record.worker].add(record.process)

    def on_died(self, record: WorkerDied) -> None:
        self._mortal.add(record.worker)

    def on_opened(self, event: Opened) -> None:
        if event.driver != self._driver:  # a new driver has other workers
            self._present.clear()
            self._lost.clear()
        self._driver = event.driver
        self._dispatched_at.clear()

    def on_lost(self, event: WorkerLost) -> None:
        """Check that a worker is lost once, and only after one of its processes died."""
        if event.worker not in self._mortal:
            self._add("I23", f"{event.worker} is said to be lost; it never died")
        if event.worker in self._lost:
            self._add("I23", f"{event.worker} is lost twice, and was not back between")
        self._lost.add(event.worker)
        self._change()

    def on_joined(self, event: Joined) -> None:
        """Check that a joining process exists, and that its predecessor is known to be lost."""
        if event.component is not Component.WORKER:
            return
        name, process = event.name, event.incarnation
        before = self._present.get(name)
        if process not in self._started[name]:
            self._add("I23", f"{process!r} joins as {name}; no such process was started")
        if before is not None and name not in self._lost:
            self._add("I23", f"{process} joins as {name}, and {before} was not lost")
        self._present[name] = process
        self._lost.discard(name)
        self._change()

    def on_dispatched(self, event: Dispatched) -> None:
        self._moves += 1
        self._dispatched_at[event.prompt_index] = self._moves

    def on_returned(self, event: Returned) -> None:
        """Check that a group is returned as lost with its worker only after a worker was lost."""
        sent_at = self._dispatched_at.pop(event.prompt_index, 0)
        if event.reason != WORKER_LOST or self._lost or self._changed_at > sent_at:
            return
        self._add(
            "I23",
            f"group {event.prompt_index} is lost with its worker, and since its dispatch no worker "
            "was lost or came back",
        )

    def _change(self) -> None:
        self._moves += 1
        self._changed_at = self._moves


LASTING: Final = frozenset({"engine_flaps", "loads_hang"})
"""Faults that kill a process at every restart, until the run ends."""

_COSTLY: Final = frozenset(
    name
    for name, kind in KINDS.items()
    if kind.profile in ("engines", "machines", "network", "controller") and kind.target != "worker"
)
"""Faults that may each kill at most one process of every engine."""


class EngineRestarts:
    """Upper bound of the engine restarts that the faults of an episode can cause."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._budget = config.generator.restart_budget
        self._engines, self._world = config.generator.engines, world

    @property
    def at_most(self) -> int | None:
        """Return the bound, or None if a fault lasts."""
        faults = self._world.faults
        if not LASTING.isdisjoint(faults):
            return None
        costly = sum(count for kind, count in faults.items() if kind in _COSTLY)
        # A poison prompt kills the engine of each attempt.
        poisoned = sum(map(len, self._world.poisoned.values()))
        return costly * self._engines + poisoned

    @property
    def explain_the_end(self) -> bool:
        """Return whether the faults can have used up ``generator.restart_budget``."""
        return self.at_most is None or self.at_most >= self._budget
