"""One pump an engine: brings it up, brings it to the current weights, notices when it is lost.

    waits for                               woken by
    the engine's first answer               the engine
    a reason to doubt it                    a failed request or sync; a background probe timer

RESTARTING -> STALE (it answered) -> HEALTHY (it acked a verified sync) -> SUSPECT -> DEAD -> ...
"""

import asyncio
from typing import Final, NoReturn

import structlog

from offbeat.controller.errors import BudgetSpent
from offbeat.controller.fleet import Health
from offbeat.controller.ports import Generator
from offbeat.controller.state import RunState
from offbeat.controller.syncing import WeightSync
from offbeat.messages.failures import ActorLost, DeadlineExceeded, EngineUnavailable

log = structlog.stdlib.get_logger()
PROBE_INTERVAL_S: Final = 2.0
_PROBES_PER_S: Final = 200  # of the whole fleet at most: a probe costs the loop about a millisecond
PROBE_DEADLINE_S: Final = 10.0
_RETRY_S: Final = 0.25
_ASKED: Final = 5  # times, within the deadline of a start
_SYNC_STRIKES: Final = 3  # failed catch-up syncs before the process is replaced


class EnginePump:
    """Keeps one engine serving, or says why it cannot."""

    def __init__(self, state: RunState, generator: Generator, sync: WeightSync) -> None:
        self._state, self._generator, self._sync = state, generator, sync
        self._name = generator.name
        self._gone = False  # the process ended by itself: its owner starts a new one unasked
        fleet_size = len(state.fleet.engines)
        self._probe_interval_s = max(PROBE_INTERVAL_S, fleet_size / _PROBES_PER_S)

    async def run(self) -> NoReturn:
        while True:
            if await self._join() and await self._catch_up():
                await self._until_lost()
            await self._restart()

    async def _join(self) -> bool:
        """True once the engine has answered; it is STALE then. False: replace it.

        Raises:
            DeadlineExceeded: It did not within ``generator.start_deadline_s``, and no other engine
                serves.
        """
        try:
            await self._start()
        except DeadlineExceeded as late:
            if not self._state.fleet.serving:
                raise
            log.warning("engine.start_late", engine=self._name, error=str(late))
            return False
        return True

    async def _start(self) -> None:
        deadline_s = self._state.config.generator.start_deadline_s
        await self._state.call(
            f"start of {self._name}",
            on="its first answer (is there room for it in the cluster?)",
            deadline_s=deadline_s,
            reply=self._first_answer(),
        )

    async def _first_answer(self) -> None:
        patience_s = self._state.config.generator.start_deadline_s / _ASKED
        while True:
            try:
                async with asyncio.timeout(patience_s):  # a lost call is asked again
                    state = await self._generator.state(self._state.fence)
            except (ActorLost, EngineUnavailable, TimeoutError):
                await asyncio.sleep(_RETRY_S)
                continue
            if self._state.fleet.heard(state):
                self._state.engine_moved(self._name)
                return
            await asyncio.sleep(_RETRY_S)  # the process that was given up still answers

    async def _catch_up(self) -> bool:
        """Bring a STALE engine to the current release; False when it has to be replaced."""
        state = self._state
        for _ in range(_SYNC_STRIKES):
            await self._sync.first_release(self._name)
            if await self._sync.catch_up(self._name):
                return True
            await state.awaits.pause(self._name, on="another sync", for_s=_RETRY_S)
            if not await self._probe():
                return False
        return False

    async def _until_lost(self) -> None:
        """Return once the engine is dead, or stale beyond repair."""
        engine = self._state.fleet.engines[self._name]
        while True:
            await self._doubt_or_timer()
            incarnation = engine.incarnation
            if self._name in self._state.condemned or not await self._probe():
                return
            behind = engine.health is Health.STALE or self._sync.is_behind(engine)
            if (engine.incarnation != incarnation or behind) and not await self._catch_up():
                return

    async def _doubt_or_timer(self) -> None:
        engine, doubts = self._state.fleet.engines[self._name], self._state.doubts[self._name]
        try:
            async with asyncio.timeout(self._probe_interval_s):
                await doubts.wait_for(
                    lambda: engine.health is not Health.HEALTHY or self._sync.is_behind(engine)
                )
        except TimeoutError:
            pass  # the background probe timer

    async def _probe(self) -> bool:
        """Ask the engine for its state; False when it does not answer."""
        state = self._state
        try:
            answer = await state.call(
                f"probe of {self._name}",
                on=self._name,
                deadline_s=PROBE_DEADLINE_S,
                reply=self._generator.state(state.fence),
                background=True,
            )
        except (ActorLost, DeadlineExceeded, EngineUnavailable) as failure:
            self._gone = isinstance(failure, ActorLost)
            log.warning("engine.lost", engine=self._name, error=str(failure))
            return False
        state.fleet.heard(answer)
        state.busy.engine_changed(state.fleet.engines[self._name])
        state.changed.notify()  # not ``moved``: a probe is no progress
        return True

    async def _restart(self) -> None:
        state, budget = self._state, self._state.config.generator.restart_budget
        state.fleet.dead(self._name)
        state.condemned.discard(self._name)
        state.trace.mark(
            ("engine", self._name), "lost", asyncio.get_running_loop().time(), gone=self._gone
        )
        if state.engines_replaced >= budget:
            raise BudgetSpent("engine restarts", budget, "generator.restart_budget", self._name)
        state.engines_replaced += 1
        if not self._gone:
            await self._generator.restart()
        state.fleet.restarting(self._name)
        self._gone = False
        state.engine_moved(self._name)
