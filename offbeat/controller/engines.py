"""Engine pumps: each starts one engine, syncs it to the current weights, and detects its loss.

RESTARTING -> STALE (it answered) -> HEALTHY (it acked a verified sync) -> SUSPECT -> DEAD -> ...

An engine that fails again and again is retired. The run continues with the other engines.
"""

import asyncio
from functools import partial
from typing import Final

import structlog

from offbeat.config.limits import start_deadline_s
from offbeat.controller.engine_record import Health
from offbeat.controller.errors import EngineBudgetSpent, EngineNotStarted
from offbeat.controller.events import EngineLost, Retired
from offbeat.controller.ports import Generator
from offbeat.controller.starting import describe_first_answer, first_answer
from offbeat.controller.state import RunState
from offbeat.controller.syncing import WeightSync
from offbeat.messages.failures import ActorLost, Component, DeadlineExceeded, EngineUnavailable
from offbeat.messages.fixed_times import RETRY_S

log = structlog.stdlib.get_logger()
_PROBES_PER_S: Final = 200  # of the whole fleet at most: a probe costs the loop about a millisecond
_SYNC_STRIKES: Final = 3  # failed catch-up syncs before the process is replaced
_SYNC_TIMEOUTS: Final = 2  # syncs past their deadline per incarnation, before it is replaced


class EnginePump:
    """Keeps one engine serving, or raises when it cannot be recovered.

    consumes   answers to probes, failures of requests and syncs
    produces   a HEALTHY engine, or a retired one
    waits for  the engine's first answer, a release to load, then for a sign that it is lost
    woken by   the engine, the sync pump, a failed request or sync, a background probe timer
    """

    def __init__(self, state: RunState, generator: Generator, sync: WeightSync) -> None:
        self._state, self._generator, self._sync = state, generator, sync
        self._name = generator.name
        self._gone = False  # the process ended by itself: its owner restarts it without a request
        self._last_failure = ""
        self._config, fleet_size = state.config.generator, len(state.fleet.engines)
        self._probe_interval_s = max(self._config.probe_interval_s, fleet_size / _PROBES_PER_S)

    async def run(self) -> None:
        """Keep the engine in service until it is retired. Return at once if it already was.

        Raises:
            EngineBudgetSpent: The engine needs more restarts than the budget, and the run needs it.
            EngineNotStarted: The engine does not start, and no other engine is alive.
        """
        if self._name in self._state.costs.retired:
            await self._generator.retire()  # that controller may have died before it did
            return
        while True:
            if await self._join() and await self._catch_up():
                await self._until_lost()
            self._give_up()
            if self._is_retired():
                await self._retire()
                return
            await self._restart()

    async def _join(self) -> bool:
        """Wait until the engine has replied and is STALE. Return False if it must be replaced.

        Raises:
            EngineNotStarted: The engine did not reply within ``generator.start_deadline_s``, and no
                other engine is alive.
        """
        try:
            await self._start()
        except DeadlineExceeded as late:
            if not self._state.fleet.is_another_alive(self._name):
                raise EngineNotStarted(
                    late.waiter, late.target, late.deadline_s, Component.ENGINE
                ) from late
            log.warning("engine.start_late", engine=self._name, error=str(late))
            self._last_failure = str(late)
            return False
        return True

    async def _start(self) -> None:
        deadline_s = start_deadline_s(self._config)
        await self._state.waits.call(
            f"start of {self._name}",
            target=describe_first_answer(self._state.config.runtime),
            component=Component.ENGINE,
            deadline_s=deadline_s,
            reply=self._first_answer(),
        )

    async def _first_answer(self) -> None:
        get_state = partial(self._generator.state, self._state.fence)
        while True:
            state = await first_answer(get_state, start_deadline_s(self._config))
            if self._state.fleet.probe_answered(state):
                self._state.joined(Component.ENGINE, self._name, state.incarnation)
                return
            await asyncio.sleep(RETRY_S)  # the process that was given up still answers

    async def _catch_up(self) -> bool:
        """Sync a STALE engine to the current release. Return False if it must be replaced."""
        state, engine = self._state, self._state.fleet.engines[self._name]
        strikes = 0
        while strikes < _SYNC_STRIKES:
            await self._sync.first_release(self._name)
            if await self._catch_up_unless_lost():
                return True
            if engine.is_given_up or engine.sync_timeouts >= _SYNC_TIMEOUTS:
                return False
            # Without the release, or the trainer that sends it, the engine is not at fault. A newer
            # release may have replaced the release that it asked for.
            missed = state.sync.is_lost or self._name in self._sync.missed
            strikes += not missed and await self._sync.sender_answers(self._name)
            if self._sync.canaries.must_be_replaced(self._name):
                return False
            await state.waits.pause(self._name, target="another sync", for_s=RETRY_S)
            if not await self._probe():
                return False
        return False

    async def _catch_up_unless_lost(self) -> bool:
        """Sync the engine once. Return False if the sync failed or the engine was lost meanwhile.

        The transfer may hold the lock of all syncs. So if the engine is lost, the transfer is ended
        before its deadline.
        """
        watch = asyncio.ensure_future(self._give_up_if_lost())
        try:
            return await self._sync.catch_up(self._name)
        finally:
            if watch.done():
                watch.result()  # or its error
            watch.cancel()

    async def _give_up_if_lost(self) -> None:
        """Probe the engine until it is lost, then end the transfer to it."""
        while True:
            await asyncio.sleep(self._probe_interval_s)
            if not await self._probe():
                break
        self._state.fleet.dead(self._name)
        self._state.waits.give_up(self._name, self._last_failure)

    async def _until_lost(self) -> None:
        """Wait until the engine is dead, or stale and beyond repair."""
        engine = self._state.fleet.engines[self._name]
        while True:
            await self._doubt_or_timer()
            incarnation = engine.incarnation
            if not await self._probe() or self._state.fleet.is_failing(self._name):
                return
            if engine.incarnation != incarnation:  # its owner has started a process already
                self._state.fleet.replaced += 1
                if self._state.fleet.replaced > self._config.restart_budget or self._is_hopeless():
                    return
            behind = engine.health is Health.STALE or self._sync.is_behind(engine)
            if (engine.incarnation != incarnation or behind) and not await self._catch_up():
                return

    async def _doubt_or_timer(self) -> None:
        engine, signal = (
            self._state.fleet.engines[self._name],
            self._state.engine_signals[self._name],
        )
        try:
            async with asyncio.timeout(self._probe_interval_s):
                await signal.wait_for(
                    lambda: engine.health is not Health.HEALTHY or self._sync.is_behind(engine)
                )
        except TimeoutError:
            pass  # the background probe timer

    async def _probe(self) -> bool:
        """Probe the engine's state. Return False if it is gone, broken, or silent for too long.

        An engine that misses a single probe may be compiling or short of CPU. It gets no work and
        is probed again. If its requests fail as well, it counts as gone.
        """
        for probe in range(1, self._config.probe_strikes + 1):
            try:
                await self._send_probe()
            except DeadlineExceeded as late:
                last = probe == self._config.probe_strikes
                if last or self._state.fleet.is_failing(self._name):
                    return self._lost(late)
                log.warning("engine.silent", engine=self._name, error=str(late))
                self._state.fleet.suspect(self._name)
            except (ActorLost, EngineUnavailable) as failure:
                return self._lost(failure)
            else:
                return True
        return False

    def _lost(self, failure: ActorLost | DeadlineExceeded | EngineUnavailable) -> bool:
        self._gone = isinstance(failure, ActorLost)
        self._last_failure = str(failure)
        log.warning("engine.lost", engine=self._name, error=str(failure))
        return False

    async def _send_probe(self) -> None:
        """Send one probe. Raises the errors of the call."""
        state = self._state
        answer = await state.waits.call(
            f"probe of {self._name}",
            target=self._name,
            component=Component.ENGINE,
            deadline_s=self._config.probe_deadline_s,
            reply=self._generator.state(state.fence),
            background=True,
        )
        if state.fleet.probe_answered(answer):
            state.joined(Component.ENGINE, self._name, answer.incarnation)

    # --- the end of a process --------------------------------------------------------------------

    def _give_up(self) -> None:
        """Mark the engine as dead. Later messages of this process are ignored."""
        reason = self._last_failure or "its requests or weight syncs failed"
        self._state.fleet.dead(self._name)
        self._state.waits.give_up(self._name, reason)
        self._sync.canaries.replaced(self._name)
        self._state.observer.engine_ended(self._name, "lost", gone=self._gone)
        self._state.ledger.note(EngineLost(engine=self._name, reason=reason))

    def _is_retired(self) -> bool:
        """Return True if the dead engine stays down, or False if it is restarted.

        Raises:
            EngineBudgetSpent: The restart budget is spent, and the run needs this engine.
        """
        state, budget = self._state, self._config.restart_budget
        if state.fleet.replaced >= budget:
            if not self._can_be_spared():
                key, last = "generator.restart_budget", f"{self._name} was lost again"
                if self._last_failure:
                    last += f": {self._last_failure}"
                raise EngineBudgetSpent("engine restarts", budget, key, last)
            return True
        return self._is_hopeless()

    def _is_hopeless(self) -> bool:
        """Return whether the engine fails after every restart and the run does not need it."""
        fruitless = self._state.fleet.engines[self._name].fruitless
        return fruitless > self._config.retire_after and self._can_be_spared()

    def _can_be_spared(self) -> bool:
        fleet = self._state.fleet
        return len(fleet.engines) - len(fleet.retired) > self._config.min_engines

    async def _retire(self) -> None:
        """Continue without the engine: its process ends and is not restarted."""
        state, fleet = self._state, self._state.fleet
        fleet.retire(self._name)
        self._sync.canaries.retired(self._name)
        state.observer.engine_ended(self._name, "retired")
        state.ledger.note(Retired(engine=self._name, reason=self._last_failure))
        log.warning(
            "engine.retired",
            engine=self._name,
            restarts=state.fleet.replaced,
            engines_left=len(fleet.engines) - len(fleet.retired),
            fix="what failed is in the lines engine.lost before this one; a resumed run starts it again",
        )
        # The next controller must know before the process ends, or it would wait for its start.
        await state.waits.durable(f"retirement of {self._name}")
        await self._generator.retire()

    async def _restart(self) -> None:
        state = self._state
        state.fleet.replaced += 1
        if not self._gone:
            await self._generator.restart()
        state.fleet.restarting(self._name)
        self._gone = False
