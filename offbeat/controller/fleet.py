"""Decides which engines may serve, and which one serves next. Pure.

No I/O, no clock, no asyncio.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from offbeat.controller.health import MOVES, Health, IllegalHealth
from offbeat.controller.pool import EnginePool
from offbeat.messages.failures import OffbeatError
from offbeat.messages.weights import EngineState, WeightsAck

_NAMED: Final = 8  # engines that a line for people spells out


_UP: Final = frozenset({Health.HEALTHY, Health.SUSPECT})
_ALIVE: Final = _UP | {Health.STALE}


class NothingOutstanding(OffbeatError):
    """A group was given back that the engine never had, or had given back already."""

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.engine = engine

    def __str__(self) -> str:
        return f"{self.engine} has no groups out: each that it took is given back once"


@dataclass(slots=True)
class EngineRecord:
    """The controller's belief about one engine. Only its fleet changes it."""

    name: str
    health: Health = Health.RESTARTING
    incarnation: str = ""
    version: int = -1  # acked by this incarnation since the last rewind; -1 for none
    outstanding: int = 0  # prompt groups, over all incarnations
    pinned: bool = False  # to its version, for an evaluation
    strikes: int = 0  # requests failed in a row, of this incarnation
    fruitless: int = 0  # incarnations that have ended since it last answered a request
    syncs_apart: bool = False  # a transfer to it passed its deadline: no sync waits for it
    sync_timeouts: int = 0  # transfers to this incarnation that passed their deadline
    former: set[str] = field(default_factory=set[str])  # incarnations before this one
    busy_s: float = 0.0  # decoding, over all incarnations, as last reported
    tokens: int = 0  # generated, likewise
    reported_busy_s: float = 0.0  # of this incarnation alone
    reported_tokens: int = 0

    @property
    def doubted(self) -> bool:
        """Return whether the engine gets no work and its pump has something to find out."""
        return self.health is not Health.HEALTHY

    @property
    def is_on_trial(self) -> bool:
        """Return whether the last request failed and one is out.

        No more is sent until it is answered.
        """
        return self.strikes > 0 and self.outstanding > 0

    def account(self, state: EngineState | WeightsAck) -> None:
        """Add what this incarnation has done since it last reported."""
        self.busy_s += state.busy_s - self.reported_busy_s
        self.tokens += state.tokens - self.reported_tokens
        self.reported_busy_s, self.reported_tokens = state.busy_s, state.tokens

    def reborn(self, incarnation: str) -> None:
        """Take over another process that answers under this name."""
        if self.incarnation:
            self.former.add(self.incarnation)
        self.incarnation, self.version = incarnation, -1
        self.strikes = self.sync_timeouts = 0
        self.reported_busy_s, self.reported_tokens = 0.0, 0

    def __str__(self) -> str:
        pinned = ", pinned" if self.pinned else ""
        return f"{self.name} {self.health} v{self.version} ({self.outstanding} groups{pinned})"


class Fleet:
    """Health and routing of all engines.

    STALE becomes HEALTHY only by ``acked``: a completed, verified sync of the living incarnation.
    News that comes too late, of a former incarnation or of an engine given up, changes nothing; a
    move that the table does not have raises ``IllegalHealth``.

    ``serving_version`` is the lowest version acked by a HEALTHY engine, those that are pinned left
    aside while others serve; with none serving it stays where it was. Nothing here looks at all
    engines but ``in_sync_set``, ``is_another_alive``, ``serving``, ``retired``, ``pin``, ``rewound`` and ``str``.
    """

    def __init__(self, names: Iterable[str], request_strikes: int = 3) -> None:
        """``request_strikes``: requests failed in a row after which an engine must be replaced."""
        self.engines = {name: EngineRecord(name) for name in names}
        self.serving_version = 0
        self.restarts = 0  # of all engines
        self._request_strikes = request_strikes
        self._routed = EnginePool[EngineRecord]()  # HEALTHY
        self._pinned = EnginePool[EngineRecord]()  # HEALTHY and pinned
        self._newest = -1  # version released, or acked by any engine, since the last rewind

    def __str__(self) -> str:
        engines = list(self.engines.values())
        if len(engines) <= _NAMED:
            return ", ".join(map(str, engines))
        counts = Counter(engine.health for engine in engines)
        doubted = [str(engine) for engine in engines if engine.doubted][:_NAMED]
        return ", ".join([f"{counts[health]} {health}" for health in Health] + doubted)

    # --- routing ---------------------------------------------------------------------------------

    @property
    def serving(self) -> list[EngineRecord]:
        """The HEALTHY engines, in the order they were named."""
        return [e for e in self.engines.values() if e.health is Health.HEALTHY]

    @property
    def serving_count(self) -> int:
        """Return the number of HEALTHY engines."""
        return len(self._routed) + len(self._pinned)

    def is_another_alive(self, name: str) -> bool:
        """Return whether another engine has answered in its present incarnation.

        Looks at all of them.
        """
        return any(e.health in _ALIVE for e in self.engines.values() if e.name != name)

    def pick(self, avoid: str = "") -> EngineRecord | None:
        """The HEALTHY engine with the least outstanding groups; None when there is none.

        Equals take turns. An engine that answers requests with failures at once always has the
        least: so one whose last request failed is given a single group until a request is answered.
        ``avoid`` names an engine that is passed over. Both hold only as long as another engine
        serves. A pinned one is picked only when no other serves.
        """
        pool = self._routed or self._pinned
        idlest = pool.idlest
        if idlest is None or not (idlest.is_on_trial or idlest.name == avoid):
            return idlest
        fit = (each for each in pool if not (each.is_on_trial or each.name == avoid))
        return next(fit, idlest)

    def in_sync_set(self) -> list[str]:
        """Engines that take part in the next weight sync: alive, not pinned, not syncing apart."""
        return [
            engine.name
            for engine in self.engines.values()
            if engine.health in _ALIVE and not (engine.pinned or engine.syncs_apart)
        ]

    def took(self, name: str) -> None:
        """A group goes to this engine."""
        self._load(self.engines[name], 1)

    def gave_back(self, name: str) -> None:
        """A group that this engine took came back, failed, or was cancelled.

        Raises:
            NothingOutstanding: It has none.
        """
        engine = self.engines[name]
        if not engine.outstanding:
            raise NothingOutstanding(name)
        self._load(engine, -1)

    # --- news of one engine ----------------------------------------------------------------------

    def probe_answered(self, state: EngineState) -> bool:
        """Take in an engine's answer to a probe; False when it came too late and changed nothing.

        A new incarnation is STALE whatever it says it serves. The same one is cleared of suspicion
        if it still serves what it acked. The answer of a dead engine is ignored until ``restarting``, and
        then only in a new incarnation.
        """
        engine = self.engines[state.name]
        given_up = engine.health in (Health.DEAD, Health.RETIRED)
        if given_up or state.incarnation in engine.former:
            return False
        if state.incarnation != engine.incarnation:
            self._reborn(engine, state.incarnation)
        elif engine.health is Health.RESTARTING:
            return False
        elif engine.health is Health.SUSPECT:
            served = state.version == engine.version and engine.version >= 0
            self._become(engine, Health.HEALTHY if served else Health.STALE)
        engine.account(state)
        return True

    def acked(self, ack: WeightsAck) -> bool:
        """Mark an engine as HEALTHY: it has verified and serves a version.

        False, and nothing changes: the ack is of another incarnation, of a dead engine, or of a
        version below one that this incarnation has acked since the last rewind. A pin to another version
        ends.
        """
        engine = self.engines[ack.engine]
        if (
            ack.incarnation != engine.incarnation
            or engine.health not in _ALIVE
            or ack.version < engine.version
        ):
            return False
        self._leave(engine)
        engine.pinned = engine.pinned and ack.version == engine.version
        engine.version, engine.health, engine.syncs_apart = ack.version, Health.HEALTHY, False
        self._newest = max(self._newest, ack.version)
        self._enter(engine)
        engine.account(ack)
        return True

    def suspect(self, name: str) -> None:
        """Give this engine no work until a probe answers or a sync succeeds."""
        engine = self.engines[name]
        if engine.health is Health.HEALTHY:
            self._become(engine, Health.SUSPECT)

    def request_failed(self, name: str, incarnation: str | None = None) -> bool:
        """Count a failed or late request to this engine; True when its process must be replaced.

        That is so once ``request_strikes`` have failed in a row, however well its probes answer;
        ``is_failing`` says it as well. Requests to a former incarnation, or to an engine given up,
        say nothing about the process that answers now.

        Args:
            name: The engine.
            incarnation: The incarnation that the request was sent to; default: the present one.
        """
        engine = self.engines[name]
        if engine.health not in _ALIVE or incarnation not in (None, engine.incarnation):
            return False
        engine.strikes += 1
        self.suspect(name)
        return self.is_failing(name)

    def is_failing(self, name: str) -> bool:
        """Return whether too many requests in a row failed on the present incarnation.

        It must be replaced.
        """
        return self.engines[name].strikes >= self._request_strikes

    def request_answered(self, name: str, incarnation: str | None = None) -> None:
        """A request to this engine was answered: failures in a row count from 0 again."""
        engine = self.engines[name]
        if incarnation in (None, engine.incarnation):
            engine.strikes = engine.fruitless = 0

    def stale(self, name: str) -> None:
        """A sync of this engine failed: it must not serve until one succeeds."""
        engine = self.engines[name]
        if engine.health in _UP:
            self._become(engine, Health.STALE)

    def sync_timed_out(self, name: str) -> None:
        """A transfer to this engine passed its deadline.

        The next ones are its own until it acks.
        """
        engine = self.engines[name]
        engine.syncs_apart = True
        engine.sync_timeouts += 1
        self.stale(name)

    def took_former_release(self, name: str) -> None:
        """Record that a transfer of a superseded release to this engine succeeded."""
        self.engines[name].syncs_apart = False
        self.stale(name)

    def dead(self, name: str) -> None:
        """Mark this engine as DEAD, whatever its state was."""
        engine = self.engines[name]
        engine.fruitless += engine.health is not Health.DEAD
        self._become(engine, Health.DEAD)

    def retire(self, name: str) -> None:
        """Take this engine out of service for good.

        Raises:
            IllegalHealth: The engine is not DEAD: its groups would be lost unnoticed.
        """
        self._become(self.engines[name], Health.RETIRED)

    @property
    def retired(self) -> list[str]:
        """Names of the engines that are given up for good. Looks at all of them."""
        return [e.name for e in self.engines.values() if e.health is Health.RETIRED]

    def restarting(self, name: str) -> None:
        """Record that a new incarnation of the engine was requested.

        Raises:
            IllegalHealth: The engine is not DEAD: its groups would be lost unnoticed.
        """
        engine = self.engines[name]
        self._become(engine, Health.RESTARTING)
        engine.version = -1

    # --- evaluations and rewinds -----------------------------------------------------------------

    def can_pin(self, version: int) -> bool:
        """Return whether a HEALTHY unpinned engine serves exactly ``version``."""
        return any(engine.version == version for engine in self._routed)

    def pin(self, version: int) -> str | None:
        """Hold an engine at exactly ``version``; None when no HEALTHY unpinned one serves it.

        It takes no training groups and does not count for ``serving_version``, unless it is all
        that serves, and is left out of syncs. The pin ends by ``unpin``, or as soon as the engine
        can no longer be trusted to serve that version; ``EngineRecord.pinned`` says so.
        """
        engine = next((e for e in self._routed if e.version == version), None)
        if engine is None:
            return None
        self._repin(engine, pinned=True)
        return engine.name

    def unpin(self, name: str) -> None:
        """The evaluation is over; a pin that has ended already is left alone.

        An engine behind what was released or acked meanwhile is STALE: the syncs passed it by.
        """
        engine = self.engines[name]
        if engine.pinned:
            self._repin(engine, pinned=False)
            if engine.version < self._newest:
                self._become(engine, Health.STALE)

    def released(self, version: int) -> None:
        """A version was published.

        An engine pinned below it will need a sync when it is unpinned.
        """
        self._newest = max(self._newest, version)

    def rewound(self, to_version: int) -> None:
        """Go back to an older version: version numbers mean other weights from here on.

        No engine serves until it acks a release anew, whatever it acked before; pins end.
        ``serving_version`` is ``to_version``. An ack of a release of before must not be handed in
        any more; the caller has to see to that.
        """
        for engine in self.engines.values():
            if engine.health in _UP:
                self._become(engine, Health.STALE)
            engine.version = -1
        self._newest, self.serving_version = -1, to_version

    # --- every change goes through here ----------------------------------------------------------

    def _reborn(self, engine: EngineRecord, incarnation: str) -> None:
        self.restarts += bool(engine.incarnation)
        engine.fruitless += bool(engine.incarnation) and engine.health is not Health.RESTARTING
        self._become(engine, Health.STALE)
        engine.reborn(incarnation)

    def _become(self, engine: EngineRecord, health: Health) -> None:
        """Change its health by a legal move; to stay as it is is none, and changes nothing."""
        if health is engine.health:
            return
        if health not in MOVES[engine.health]:
            raise IllegalHealth(engine.name, engine.health, health)
        self._leave(engine)
        engine.health = health
        engine.pinned = engine.pinned and health in _UP
        self._enter(engine)

    def _repin(self, engine: EngineRecord, *, pinned: bool) -> None:
        self._leave(engine)
        engine.pinned = pinned
        self._enter(engine)

    def _load(self, engine: EngineRecord, change: int) -> None:
        if engine.health is not Health.HEALTHY:
            engine.outstanding += change
            return
        pool = self._pinned if engine.pinned else self._routed
        pool.remove(engine)
        engine.outstanding += change
        pool.add(engine)

    def _leave(self, engine: EngineRecord) -> None:
        if engine.health is Health.HEALTHY:
            (self._pinned if engine.pinned else self._routed).remove(engine)

    def _enter(self, engine: EngineRecord) -> None:
        if engine.health is Health.HEALTHY:
            (self._pinned if engine.pinned else self._routed).add(engine)
        if pool := self._routed or self._pinned:
            self.serving_version = pool.oldest_version
