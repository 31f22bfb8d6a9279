"""Health and routing of engines: which engines may serve, and which one gets the next group.

Orders the engines that may get work by their load. Pure: no I/O, no clock, no asyncio.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from offbeat.controller.engine_record import MOVES, EngineRecord, Health, IllegalHealth
from offbeat.messages.failures import OffbeatError
from offbeat.messages.weights import EngineState, WeightsAck


class EnginePool:
    """Orders engines by load. Engines with equal load are ordered by the time they reached it.

    So engines with equal load are used in turn. Before a member's version changes, the caller must
    remove the member, and add it again afterwards. After a member's load has changed, the caller
    must call ``reorder``. The cost of these calls and of ``idlest`` does not depend on the number
    of members.
    """

    def __init__(self) -> None:
        # An OrderedDict, since the first key of a dict is found by passing all that were deleted.
        self._by_load: dict[int, OrderedDict[str, EngineRecord]] = {}
        self._versions: dict[int, int] = {}  # members by version; a few versions, no zeros
        self._least = 0  # load of the idlest, while there is one
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[EngineRecord]:
        """Yield the members, the idlest first."""
        for load in sorted(self._by_load):
            yield from self._by_load[load].values()

    @property
    def idlest(self) -> EngineRecord | None:
        """Return the member with the fewest outstanding groups.

        Among equals, the first one wins.
        """
        return next(iter(self._by_load[self._least].values())) if self._size else None

    @property
    def oldest_version(self) -> int:
        """Return the lowest version of all members. There must be a member."""
        return min(self._versions)

    def add(self, member: EngineRecord) -> None:
        self._enter(member)
        self._versions[member.version] = self._versions.get(member.version, 0) + 1
        self._size += 1

    def reorder(self, member: EngineRecord, former_load: int) -> None:
        """Move a member with a changed load behind the others with the same load."""
        self._leave(member, former_load)
        self._enter(member)

    def remove(self, member: EngineRecord) -> None:
        version = member.version
        self._leave(member, member.outstanding)
        self._size -= 1
        if self._versions[version] == 1:
            del self._versions[version]
        else:
            self._versions[version] -= 1

    def _enter(self, member: EngineRecord) -> None:
        load = member.outstanding
        if load in self._by_load:
            self._by_load[load][member.name] = member
            return
        self._least = min(self._least, load) if self._by_load else load
        self._by_load[load] = OrderedDict({member.name: member})

    def _leave(self, member: EngineRecord, load: int) -> None:
        equals = self._by_load[load]
        del equals[member.name]
        if not equals:
            del self._by_load[load]
            if load == self._least and self._by_load:
                self._least = min(self._by_load)


_NAMED: Final = 8  # engines listed in a message


_UP: Final = frozenset({Health.HEALTHY, Health.SUSPECT})
_ALIVE: Final = _UP | {Health.STALE}


class NothingOutstanding(OffbeatError):
    """An engine returned a group that it never had, or had returned already.

    Fix: report it.
    """

    engine: str

    def __str__(self) -> str:
        return f"{self.engine} has no groups out: each that it took is given back once"


def _ignore(engine: EngineRecord) -> None:
    """Do nothing: outside a controller no task waits for an engine."""


class Fleet:
    """Health and routing of all engines.

    Only ``acked`` makes a STALE engine HEALTHY, because it means that the living process has
    completed a verified sync. Late messages, from a former incarnation or from an engine that was
    given up, change nothing. An illegal transition raises ``IllegalHealth``.

    ``serving_version`` is the lowest version acked by a HEALTHY engine. Pinned engines count only
    if no other engine serves. While no engine serves, the number stays unchanged. The only methods
    with a cost linear in the number of engines are ``in_sync_set``, ``is_another_alive``,
    ``serving``, ``retired``, ``pin``, ``rewound`` and ``str``.
    """

    def __init__(
        self,
        names: Iterable[str],
        request_strikes: int = 3,
        on_change: Callable[[EngineRecord], None] = _ignore,
        on_report: Callable[[EngineRecord], None] = _ignore,
    ) -> None:
        """Create the fleet, before any engine has replied.

        Args:
            names: The engines.
            request_strikes: Failed requests in a row after which an engine is replaced.
            on_change: Called with an engine after its health, version, pin or strikes have changed.
            on_report: Called with an engine after its figures have changed, its first group was
                assigned, or its last group was returned.
        """
        self._on_change, self._on_report = on_change, on_report
        self.replaced = 0  # processes given up, except for retired engines
        self.engines = {name: EngineRecord(name) for name in names}
        self.serving_version = 0
        self.restarts = 0  # of all engines
        self._request_strikes = request_strikes
        self._routed = EnginePool()  # HEALTHY
        self._pinned = EnginePool()  # HEALTHY and pinned
        self._newest = -1  # newest version released, or acked by any engine, since the last rewind

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
        """Return the HEALTHY engines, in the order of their names."""
        return [e for e in self.engines.values() if e.health is Health.HEALTHY]

    @property
    def serving_count(self) -> int:
        """Return the number of HEALTHY engines."""
        return len(self._routed) + len(self._pinned)

    @property
    def is_serving(self) -> bool:
        """Return whether any engine is HEALTHY, so that ``pick`` returns one."""
        return len(self._routed) > 0 or len(self._pinned) > 0

    @property
    def is_any_pinned(self) -> bool:
        """Return whether any engine is pinned to its version, for an evaluation."""
        return bool(self._pinned)

    def is_another_alive(self, name: str) -> bool:
        """Return whether another engine has replied in its present incarnation. Linear in engines."""
        return any(e.health in _ALIVE for e in self.engines.values() if e.name != name)

    def pick(self, avoid: str = "") -> EngineRecord | None:
        """Return the HEALTHY engine with the fewest outstanding groups, or None if there is none.

        Engines with equal load are picked in turn. An engine that fails requests at once would
        always have the fewest groups. So after a failed request it gets one group at a time until a
        request succeeds. ``avoid`` names an engine to skip. Both of these rules apply only while
        another engine serves. A pinned engine is picked only if no other engine serves.
        """
        pool = self._routed or self._pinned
        idlest = pool.idlest
        if idlest is None or not (idlest.is_on_trial or idlest.name == avoid):
            return idlest
        fit = (each for each in pool if not (each.is_on_trial or each.name == avoid))
        return next(fit, idlest)

    def in_sync_set(self) -> list[str]:
        """Return the engines of the next weight sync: alive, not pinned, not syncing separately."""
        return [
            engine.name
            for engine in self.engines.values()
            if engine.health in _ALIVE and not (engine.pinned or engine.syncs_apart)
        ]

    def took(self, name: str) -> None:
        """Record that a group was sent to this engine."""
        self._load(self.engines[name], 1)

    def gave_back(self, name: str) -> None:
        """Record that a group of this engine was completed, failed or cancelled.

        Raises:
            NothingOutstanding: The engine has no outstanding group.
        """
        engine = self.engines[name]
        if not engine.outstanding:
            raise NothingOutstanding(name)
        self._load(engine, -1)

    # --- news of one engine ----------------------------------------------------------------------

    def probe_answered(self, state: EngineState) -> bool:
        """Process the reply to a probe. Return False if it came too late and changed nothing.

        A new incarnation is STALE, regardless of the version it reports. A known incarnation is no longer
        SUSPECT if it still serves the version that it acked. Replies of a dead engine are ignored
        until ``restarting``. After that, only replies of a new incarnation count.
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
        self._on_report(engine)
        return True

    def acked(self, ack: WeightsAck) -> bool:
        """Mark an engine as HEALTHY, because it has verified and serves a version.

        Returns False and changes nothing in three cases: the ack is from another incarnation, the
        engine is dead, or this incarnation has acked a higher version since the last rewind. If the
        engine was pinned to a different version, the pin ends.
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
        self._on_change(engine)
        return True

    def suspect(self, name: str) -> None:
        """Give this engine no work until it answers a probe or a sync succeeds."""
        engine = self.engines[name]
        if engine.health is Health.HEALTHY:
            self._become(engine, Health.SUSPECT)

    def request_failed(self, name: str, incarnation: str | None = None) -> bool:
        """Count a failed or late request. Return True if the engine's process must be replaced.

        The process must be replaced after ``request_strikes`` failures in a row, even if probes
        succeed (``is_failing``). Requests to a former incarnation, or to an engine that was given
        up, do not count.

        Args:
            name: The engine.
            incarnation: The incarnation that got the request. Default: the present one.
        """
        engine = self.engines[name]
        if engine.health not in _ALIVE or incarnation not in (None, engine.incarnation):
            return False
        engine.strikes += 1
        self.suspect(name)
        self._on_change(engine)
        return self.is_failing(name)

    def is_failing(self, name: str) -> bool:
        """Return whether too many requests in a row failed. Then the process must be replaced."""
        return self.engines[name].strikes >= self._request_strikes

    def request_answered(self, name: str, incarnation: str | None = None) -> None:
        """Record a successful request, which resets the count of failures in a row."""
        engine = self.engines[name]
        if incarnation in (None, engine.incarnation):
            engine.strikes = engine.fruitless = 0

    def stale(self, name: str) -> None:
        """Record a failed sync. The engine must not serve until a sync succeeds."""
        engine = self.engines[name]
        if engine.health in _UP:
            self._become(engine, Health.STALE)

    def sync_timed_out(self, name: str) -> None:
        """Record that a transfer has exceeded its deadline.

        Later transfers to this engine run separately until it acks.
        """
        engine = self.engines[name]
        engine.syncs_apart = True
        engine.sync_timeouts += 1
        self.stale(name)
        self._on_change(engine)

    def load_began(self, name: str) -> None:
        """Record that a release is about to be transferred to this engine."""
        self.engines[name].loads += 1

    def load_ended(self, name: str) -> None:
        """Record that this transfer is over, however it ended."""
        self.engines[name].loads -= 1
        self._on_change(self.engines[name])

    def took_former_release(self, name: str) -> None:
        """Record that a transfer of a superseded release to this engine succeeded."""
        self.engines[name].syncs_apart = False
        self.stale(name)
        self._on_change(self.engines[name])

    def dead(self, name: str) -> None:
        """Mark this engine as DEAD, from any state."""
        engine = self.engines[name]
        engine.fruitless += engine.health is not Health.DEAD
        self._become(engine, Health.DEAD)

    def retire(self, name: str) -> None:
        """Retire this engine permanently.

        Raises:
            IllegalHealth: The engine is not DEAD: its groups would be lost unnoticed.
        """
        self._become(self.engines[name], Health.RETIRED)

    @property
    def retired(self) -> list[str]:
        """Return the names of the retired engines. Linear in engines."""
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
        """Return whether ``pin`` finds an engine at ``version``."""
        return self._pinnable(version) is not None

    def pin(self, version: int) -> str | None:
        """Pin an engine to exactly ``version``. Return its name, or None if no engine qualifies.

        An engine qualifies if it is HEALTHY, not pinned, and not loading a release. The pinned
        engine is excluded from syncs. Unless no other engine serves, it gets no training groups and
        does not count for ``serving_version``. The pin ends by ``unpin``, or as soon as the engine
        may no longer serve that version. See ``EngineRecord.pinned``.
        """
        engine = self._pinnable(version)
        if engine is None:
            return None
        self._repin(engine, pinned=True)
        return engine.name

    def can_pin_all(self, version: int) -> bool:
        """Return whether ``pin`` finds every engine that is not retired. Linear in engines."""
        ready = sum(e.version == version and not e.loads for e in self._routed)
        return 0 < ready == len(self.engines) - len(self.retired)

    def _pinnable(self, version: int) -> EngineRecord | None:
        """Return an engine to pin that loads no release, because loading changes its version."""
        return next((e for e in self._routed if e.version == version and not e.loads), None)

    def unpin(self, name: str) -> None:
        """End a pin. A pin that has already ended is ignored.

        If it is behind the newest release or ack, it is now STALE, because the syncs have skipped
        it.
        """
        engine = self.engines[name]
        if engine.pinned:
            self._repin(engine, pinned=False)
            if engine.version < self._newest:
                self._become(engine, Health.STALE)

    def released(self, version: int) -> None:
        """Record that a version was published. Engines pinned below it load it after unpinning."""
        self._newest = max(self._newest, version)

    def rewound(self, to_version: int) -> None:
        """Return to an older version. From now on version numbers refer to different weights.

        No engine serves until it acks a new release, and pins end. ``serving_version`` is
        ``to_version``. The caller must not pass acks of earlier releases any
        more.
        """
        for engine in self.engines.values():
            if engine.health in _UP:
                self._become(engine, Health.STALE)
            engine.version = -1
        self._newest, self.serving_version = -1, to_version
        for engine in self.engines.values():
            self._on_change(engine)

    # --- every change goes through here ----------------------------------------------------------

    def _reborn(self, engine: EngineRecord, incarnation: str) -> None:
        self.restarts += bool(engine.incarnation)
        engine.fruitless += bool(engine.incarnation) and engine.health is not Health.RESTARTING
        self._become(engine, Health.STALE)
        engine.reborn(incarnation)
        self._on_change(engine)

    def _become(self, engine: EngineRecord, health: Health) -> None:
        """Change an engine's health by a legal transition. Do nothing if it is the same."""
        if health is engine.health:
            return
        if health not in MOVES[engine.health]:
            raise IllegalHealth(engine.name, engine.health, health)
        self._leave(engine)
        engine.health = health
        engine.pinned = engine.pinned and health in _UP
        self._enter(engine)
        self._on_change(engine)

    def _repin(self, engine: EngineRecord, *, pinned: bool) -> None:
        self._leave(engine)
        engine.pinned = pinned
        self._enter(engine)
        self._on_change(engine)

    def _load(self, engine: EngineRecord, change: int) -> None:
        load = engine.outstanding
        engine.outstanding += change
        if engine.health is Health.HEALTHY:
            (self._pinned if engine.pinned else self._routed).reorder(engine, load)
        if not (load and engine.outstanding):
            self._on_report(engine)

    def _leave(self, engine: EngineRecord) -> None:
        if engine.health is Health.HEALTHY:
            (self._pinned if engine.pinned else self._routed).remove(engine)

    def _enter(self, engine: EngineRecord) -> None:
        if engine.health is Health.HEALTHY:
            (self._pinned if engine.pinned else self._routed).add(engine)
        if pool := self._routed or self._pinned:
            self.serving_version = pool.oldest_version
