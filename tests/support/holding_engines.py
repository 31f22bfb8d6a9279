"""Engine actors that can be made to hold a transfer; a module that Ray's workers can import."""

import asyncio

from offbeat.actors.engine_actor import EmbeddedEngineActor
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.engine_server import EngineServer, LoadOutcome
from offbeat.generators.incoming import IncomingRelease


class HoldingEngine(EngineServer):
    """An engine that can be made to hold the next release it receives and never to load it."""

    _release_received: asyncio.Event | None = None

    async def hold(self) -> None:
        self._release_received = asyncio.Event()

    async def until_held(self) -> None:
        assert self._release_received is not None
        await self._release_received.wait()

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        if self._release_received is not None:
            self._release_received.set()
            await asyncio.Event().wait()
        return await super()._load_release(incoming)


class HoldingEmbedded(HoldingEngine, EmbeddedEngineActor): ...


class HoldingServer(HoldingEngine, EmbeddedEngineServer): ...
