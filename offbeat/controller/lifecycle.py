"""The phases of a run, and the legal changes between them."""

import enum
from collections.abc import Callable, Mapping
from typing import Final

import structlog

log = structlog.stdlib.get_logger()


class RunPhase(enum.StrEnum):
    """The phases of a run."""

    STARTING = "starting"
    RUNNING = "running"
    SYNCING = "syncing"  # generators load new weights
    REWINDING = "rewinding"  # the trainer is replaced and restored
    FINISHED = "finished"
    ABORTED = "aborted"  # an operator or a signal requested it
    FAILED = "failed"  # an error ended it


_ENDED: Final = frozenset({RunPhase.ABORTED, RunPhase.FAILED})
_MOVES: Final[Mapping[RunPhase, frozenset[RunPhase]]] = {
    RunPhase.STARTING: _ENDED | {RunPhase.RUNNING, RunPhase.REWINDING},
    RunPhase.RUNNING: _ENDED | {RunPhase.SYNCING, RunPhase.REWINDING, RunPhase.FINISHED},
    # The end of a run does not wait for the repeated release of one that was lost with a machine.
    RunPhase.SYNCING: _ENDED | {RunPhase.RUNNING, RunPhase.REWINDING, RunPhase.FINISHED},
    RunPhase.REWINDING: _ENDED | {RunPhase.RUNNING, RunPhase.REWINDING},
}


class Lifecycle:
    """Phase of one run. An illegal change raises. Every legal change notifies the waiting tasks."""

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float]) -> None:
        self._changed, self._clock = changed, clock
        self._history = [RunPhase.STARTING]
        self.running_since: float | None = None
        """Time of the first RUNNING. From then on this incarnation has served weights."""

    @property
    def phase(self) -> RunPhase:
        return self._history[-1]

    def enter(self, target: RunPhase) -> None:
        """Enter the next phase.

        Raises:
            RuntimeError: The change is not legal.
        """
        if target not in _MOVES.get(self.phase, frozenset()):
            raise RuntimeError(f"cannot enter {target} after {' -> '.join(self._history[-4:])}")
        log.debug("run.phase", old=self.phase, new=target)
        self._history = [*self._history[-3:], target]
        if target is RunPhase.RUNNING and self.running_since is None:
            self.running_since = self._clock()
        self._changed()
