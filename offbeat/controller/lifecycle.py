"""The phases of a run, and the only moves between them."""

import enum
from collections.abc import Mapping
from typing import Final

import structlog

log = structlog.stdlib.get_logger()


class Phase(enum.StrEnum):
    """Where a run is."""

    STARTING = "starting"
    RUNNING = "running"
    SYNCING = "syncing"  # generators take new weights
    REWINDING = "rewinding"  # the trainer is replaced and restored
    FINISHED = "finished"
    ABORTED = "aborted"  # someone asked
    FAILED = "failed"  # something broke


_ENDED: Final = frozenset({Phase.ABORTED, Phase.FAILED})
_MOVES: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.STARTING: _ENDED | {Phase.RUNNING, Phase.REWINDING},
    Phase.RUNNING: _ENDED | {Phase.SYNCING, Phase.REWINDING, Phase.FINISHED},
    # The end of a run waits for no release that is made again because a machine took the last one.
    Phase.SYNCING: _ENDED | {Phase.RUNNING, Phase.REWINDING, Phase.FINISHED},
    Phase.REWINDING: _ENDED | {Phase.RUNNING, Phase.REWINDING},
}


class Lifecycle:
    """The phase of one run; an illegal move raises."""

    def __init__(self) -> None:
        self._history = [Phase.STARTING]

    @property
    def phase(self) -> Phase:
        return self._history[-1]

    def enter(self, target: Phase) -> None:
        """Move on.

        Raises:
            RuntimeError: The table has no such move.
        """
        if target not in _MOVES.get(self.phase, frozenset()):
            raise RuntimeError(f"cannot enter {target} after {' -> '.join(self._history[-4:])}")
        log.debug("run.phase", old=self.phase, new=target)
        self._history = [*self._history[-3:], target]
