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
PROBE_DEADLINE_S: Final = 10.0
_RETRY_S: Final = 0.25
_SYNC_STRIKES: Final = 3  # failed catch-up syncs before the process is replaced


class EnginePump:
    """Keeps one engine serving, or says why it cannot."""

    def __init__(self, state: RunState, generator: Generator, sync: WeightSync) -> None:
        self._state, self._generator, self._sync = state, generator, sync
        self._name = generator.name
        self._gone = False  # the process ended by itself: its owner starts a new one unasked

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
        while True:
            try:
                state = await self._generator.state(self._state.fence)
            except (ActorLost, EngineUnavailable):
                await asyncio.sleep(_RETRY_S)
            else:
                self._state.fleet.heard(state)
                self._state.moved()
                return

    async def _catch_up(self) -> bool:
        """Bring a STALE engine to the current release; False when it has to be replaced."""
        state, engine = self._state, self._state.fleet.engines[self._name]
        for _ in range(_SYNC_STRIKES):
            await state.until(
                f"{self._name}", "the first weights", lambda: self._sync.release is not None
            )
            if engine.health is Health.HEALTHY or await self._sync.catch_up(self._name):
                return True
            await asyncio.sleep(_RETRY_S)
            if not await self._probe():
                return False
        return False

    async def _until_lost(self) -> None:
        """Return once the engine is dead, or stale beyond repair."""
        engine = self._state.fleet.engines[self._name]
        while True:
            await self._doubt_or_timer()
            incarnation = engine.incarnation
            if not await self._probe():
                return
            replaced = engine.incarnation != incarnation
            if (replaced or engine.health is Health.STALE) and not await self._catch_up():
                return

    async def _doubt_or_timer(self) -> None:
        engine = self._state.fleet.engines[self._name]
        try:
            async with asyncio.timeout(PROBE_INTERVAL_S):
                await self._state.changed.wait_for(lambda: engine.health is not Health.HEALTHY)
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
        state.changed.notify()
        return True

    async def _restart(self) -> None:
        state, budget = self._state, self._state.config.generator.restart_budget
        state.fleet.dead(self._name)
        if state.fleet.restarts >= budget:
            raise BudgetSpent("engine restarts", budget, "generator.restart_budget", self._name)
        if not self._gone:
            await self._generator.restart()
        state.fleet.restarting(self._name)
        self._gone = False
        state.moved()
