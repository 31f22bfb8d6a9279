"""Health of an engine, and its legal transitions."""

import enum
from collections.abc import Mapping
from typing import Final

from offbeat.messages.failures import OffbeatError


class Health(enum.StrEnum):
    """Health of an engine as the controller knows it. Only HEALTHY engines get work."""

    RESTARTING = "restarting"  # no answer yet from this incarnation
    STALE = "stale"  # alive, without verified weights of this run
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # a request failed: a probe will decide
    DEAD = "dead"  # given up; its messages are ignored
    RETIRED = "retired"  # given up until the run is resumed


MOVES: Final[Mapping[Health, frozenset[Health]]] = {
    Health.RESTARTING: frozenset({Health.STALE, Health.DEAD}),
    Health.STALE: frozenset({Health.HEALTHY, Health.DEAD}),
    Health.HEALTHY: frozenset({Health.SUSPECT, Health.STALE, Health.DEAD}),
    Health.SUSPECT: frozenset({Health.HEALTHY, Health.STALE, Health.DEAD}),
    Health.DEAD: frozenset({Health.RESTARTING, Health.RETIRED}),
    Health.RETIRED: frozenset(),
}


class IllegalHealth(OffbeatError):
    """An illegal transition of an engine's health."""

    engine: str
    was: Health
    wanted: Health

    def __str__(self) -> str:
        legal = ", ".join(sorted(MOVES[self.was])) or "nothing"
        return f"{self.engine} cannot become {self.wanted}: it is {self.was}, next may be {legal}"
