"""Layout of a run's engines, which trainer ranks cut their releases for. All engines have the same.

It saves bytes, nothing depends on it: an engine takes what it needs of any release. So the wait for
it is short, and a run whose engines do not answer publishes without.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from offbeat.actors.call import reply_of
from offbeat.actors.handles import Handle
from offbeat.messages.failures import OffbeatError
from offbeat.messages.fences import Fence
from offbeat.weight_sync.engine_layout import EngineLayout

log = structlog.stdlib.get_logger()
AskLayout = Callable[[Fence], Awaitable[EngineLayout | None]]
FIRST_SHARE: Final = 0.5
"""Share of ``sync.deadline_s`` that the first release may wait for engines that are still starting."""
_LATER_S: Final = 1.0  # wait of a release after that


class EngineLayouts:
    """Asks all engines for their layout until one has answered, and keeps it."""

    def __init__(self, engines: Mapping[str, AskLayout], first_s: float) -> None:
        """``first_s``: seconds that the first call may wait; later ones wait a second at most."""
        self._engines, self._limit_s = engines, first_s
        self._layout: EngineLayout | None = None
        self._is_over = False  # an engine answered, or all of them have none

    async def first(self, fence: Fence) -> EngineLayout | None:
        """Return the layout; None: no engine has recorded one, or none has answered in time."""
        if not self._is_over:
            limit_s, self._limit_s = self._limit_s, _LATER_S
            try:
                async with asyncio.timeout(limit_s):
                    await self._ask(fence)
            except TimeoutError:
                log.info("weights.layout_unknown", waited_s=limit_s)
        return self._layout

    async def _ask(self, fence: Fence) -> None:
        asked = [asyncio.ensure_future(ask(fence)) for ask in self._engines.values()]
        try:
            failures = 0
            for answer in asyncio.as_completed(asked):
                try:
                    self._layout = await answer
                except OffbeatError:  # the engine is synced or replaced as any other that fails
                    failures += 1
                if self._layout is not None:
                    self._is_over = True
                    return
            self._is_over = not failures
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


def layouts_of(engines: Mapping[str, Handle], deadline_s: float) -> EngineLayouts:
    """Create the layouts of engine actors, for releases with this ``sync.deadline_s``."""

    def ask_of(name: str, engine: Handle) -> AskLayout:
        return lambda fence: reply_of(engine.layout.remote(fence), name, "record its layout")

    asks = {name: ask_of(name, engine) for name, engine in engines.items()}
    return EngineLayouts(asks, FIRST_SHARE * deadline_s)
