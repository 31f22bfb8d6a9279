"""Which engines may serve, and which one serves next. Pure: no I/O, no clock, no asyncio."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.messages.weights import EngineState, WeightsAck


class Health(enum.StrEnum):
    """What the controller knows of an engine. Only HEALTHY engines are given work."""

    RESTARTING = "restarting"  # not heard of yet in this process life
    STALE = "stale"  # alive, without verified weights of this run
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # a request failed: a probe decides
    DEAD = "dead"


@dataclass(slots=True)
class Engine:
    """One engine, as the controller believes it to be."""

    name: str
    health: Health = Health.RESTARTING
    incarnation: str = ""
    version: int = -1  # acked by this incarnation; -1 for none
    outstanding: int = 0  # prompt groups
    restarts: int = 0
    busy_s: float = 0.0  # decoding, over all incarnations, as last reported
    tokens: int = 0  # generated, likewise
    reported_busy_s: float = 0.0  # of this incarnation alone
    reported_tokens: int = 0

    def account(self, state: EngineState | WeightsAck) -> None:
        """Add what this incarnation has done since it last reported."""
        self.busy_s += state.busy_s - self.reported_busy_s
        self.tokens += state.tokens - self.reported_tokens
        self.reported_busy_s, self.reported_tokens = state.busy_s, state.tokens


class Fleet:
    """Health and routing of all engines.

    STALE becomes HEALTHY only by ``acked``: a completed, verified sync of the living incarnation.
    ``serving_version`` is the lowest version acked by a HEALTHY engine; with none of them serving
    it stays where it was.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.engines = {name: Engine(name) for name in names}
        self.serving_version = 0

    def __str__(self) -> str:
        return ", ".join(
            f"{e.name} {e.health} v{e.version} ({e.outstanding} groups)"
            for e in self.engines.values()
        )

    @property
    def serving(self) -> list[Engine]:
        """The engines that may be given work."""
        return [e for e in self.engines.values() if e.health is Health.HEALTHY]

    @property
    def restarts(self) -> int:
        return sum(engine.restarts for engine in self.engines.values())

    def pick(self) -> Engine | None:
        """The HEALTHY engine with the least outstanding groups; None when there is none."""
        return min(self.serving, key=lambda engine: engine.outstanding, default=None)

    def in_sync_set(self) -> list[str]:
        """Engines that take part in the next weight sync."""
        takes_part = (Health.HEALTHY, Health.STALE, Health.SUSPECT)
        return [e.name for e in self.engines.values() if e.health in takes_part]

    def took(self, name: str) -> None:
        self.engines[name].outstanding += 1

    def gave_back(self, name: str) -> None:
        self.engines[name].outstanding -= 1

    def heard(self, state: EngineState) -> None:
        """An engine answered a probe.

        A new incarnation is STALE whatever it says it serves. The same one is cleared of suspicion
        if it still serves what it acked.
        """
        engine = self.engines[state.name]
        if state.incarnation != engine.incarnation:
            engine.restarts += bool(engine.incarnation)
            engine.incarnation, engine.version = state.incarnation, -1
            engine.reported_busy_s, engine.reported_tokens = 0.0, 0
            engine.health = Health.STALE
        elif engine.health is Health.SUSPECT:
            served = state.version == engine.version and engine.version >= 0
            engine.health = Health.HEALTHY if served else Health.STALE
        engine.account(state)
        self._reconsider()

    def acked(self, ack: WeightsAck) -> bool:
        """An engine verified and serves a version. False: the ack is of another process life."""
        engine = self.engines[ack.engine]
        if ack.incarnation != engine.incarnation or engine.health in (
            Health.DEAD,
            Health.RESTARTING,
        ):
            return False
        engine.version, engine.health = ack.version, Health.HEALTHY
        engine.account(ack)
        self._reconsider()
        return True

    def suspect(self, name: str) -> None:
        """A request to this engine failed; no work for it until a probe answers."""
        if self.engines[name].health is Health.HEALTHY:
            self.engines[name].health = Health.SUSPECT
            self._reconsider()

    def stale(self, name: str) -> None:
        """A sync of this engine failed: it must not serve until one succeeds."""
        if self.engines[name].health in (Health.HEALTHY, Health.SUSPECT):
            self.engines[name].health = Health.STALE
            self._reconsider()

    def dead(self, name: str) -> None:
        self.engines[name].health = Health.DEAD
        self._reconsider()

    def restarting(self, name: str) -> None:
        """A new process life was asked for."""
        engine = self.engines[name]
        engine.health, engine.version = Health.RESTARTING, -1
        self._reconsider()

    def _reconsider(self) -> None:
        if serving := self.serving:
            self.serving_version = min(engine.version for engine in serving)
