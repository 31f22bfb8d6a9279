"""State of one engine as the controller knows it.

Health of an engine, and its legal transitions.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from offbeat.messages.failures import OffbeatError
from offbeat.messages.weights import EngineState, WeightsAck


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
    """An illegal transition of an engine's health.

    Fix: report it.
    """

    engine: str
    was: Health
    wanted: Health

    def __str__(self) -> str:
        legal = ", ".join(sorted(MOVES[self.was])) or "nothing"
        return f"{self.engine} cannot become {self.wanted}: it is {self.was}, next may be {legal}"


@dataclass(slots=True)
class EngineRecord:
    """State of one engine as the controller knows it. Only the fleet changes this state."""

    name: str
    health: Health = Health.RESTARTING
    incarnation: str = ""
    version: int = -1  # acked by this incarnation since the last rewind; -1 for none
    outstanding: int = 0  # prompt groups, over all incarnations
    pinned: bool = False  # to its version, for an evaluation
    loads: int = 0  # transfers of a release to it in progress
    strikes: int = 0  # requests failed in a row, of this incarnation
    fruitless: int = 0  # incarnations that ended since it last completed a request
    # Whether its transfers run separately, because one passed its deadline
    syncs_apart: bool = False
    sync_timeouts: int = 0  # transfers to this incarnation that passed their deadline
    former: set[str] = field(default_factory=set[str])  # incarnations before this one
    busy_s: float = 0.0  # decoding, over all incarnations, as last reported
    tokens: int = 0  # generated, likewise
    cpu_s: float = 0.0  # of its processes, likewise
    reported_busy_s: float = 0.0  # only of this incarnation
    reported_tokens: int = 0
    reported_cpu_s: float = 0.0

    @property
    def doubted(self) -> bool:
        """Return whether the engine gets no work until its pump has checked it."""
        return self.health is not Health.HEALTHY

    @property
    def is_given_up(self) -> bool:
        """Return whether no process of the engine is known to live, so its replies are ignored."""
        return self.health in (Health.DEAD, Health.RESTARTING, Health.RETIRED)

    @property
    def is_on_trial(self) -> bool:
        """Return whether the last request failed and a new one is open."""
        return self.strikes > 0 and self.outstanding > 0

    def account(self, state: EngineState | WeightsAck) -> None:
        """Add the work of this incarnation since its last report."""
        self.busy_s += state.busy_s - self.reported_busy_s
        self.tokens += state.tokens - self.reported_tokens
        self.cpu_s += state.cpu_s - self.reported_cpu_s
        self.reported_busy_s, self.reported_tokens = state.busy_s, state.tokens
        self.reported_cpu_s = state.cpu_s

    def reborn(self, incarnation: str) -> None:
        """Switch to another process that answers under this name."""
        if self.incarnation:
            self.former.add(self.incarnation)
        self.incarnation, self.version = incarnation, -1
        self.strikes = self.sync_timeouts = 0
        self.reported_busy_s, self.reported_tokens = 0.0, 0
        self.reported_cpu_s = 0.0

    def __str__(self) -> str:
        pinned = ", pinned" if self.pinned else ""
        return f"{self.name} {self.health} v{self.version} ({self.outstanding} groups{pinned})"
