"""Ray actors of the embedded engine and of the stub engine. One actor is one engine."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from offbeat.actors.call_batching import BatchedReply, ReplyBatcher
from offbeat.actors.ray_run_files import set_up_files
from offbeat.fakes.engine_server import StubEngineServer
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.engine_server import EngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.telemetry.logs import pause_collections


class EngineActor(EngineServer):
    """Mixin that lets environment workers call an engine server in batches. Async.

    In an actor class, this base must come before the server.
    """

    @cached_property
    def _requests(self) -> ReplyBatcher[GenerateRequest, GenerateResult]:
        return ReplyBatcher(self.generate, self.classify)

    async def exchange(
        self,
        worker: str,
        incarnation: str,
        requests: Sequence[tuple[int, GenerateRequest]],
        cancelled: Sequence[int],
        doubted: Sequence[int] = (),
    ) -> list[BatchedReply[GenerateResult]]:
        """Generate for an environment worker, as described in ``offbeat.actors.call_batching``."""
        return await self._requests.exchange(worker, incarnation, requests, cancelled, doubted)

    async def close(self) -> None:
        await self._requests.close()
        await super().close()


class EmbeddedEngineActor(EngineActor, EmbeddedEngineServer):
    """Ray actor of the embedded engine."""

    def __init__(self, spec: EngineSpec) -> None:
        set_up_files(spec.name, spec.run_dir, spec.sharing)
        with pause_collections():
            from offbeat.generators.embedded import start  # noqa: PLC0415 -- it imports torch

            del start  # the server imports it again, at no cost
        super().__init__(spec)


class StubEngineActor(EngineActor, StubEngineServer):
    """Ray actor of the stub engine, for dry runs without torch."""

    def __init__(self, spec: EngineSpec) -> None:
        set_up_files(spec.name, spec.run_dir, spec.sharing)
        super().__init__(spec)


def make_actor_class(server: Any) -> type[EngineActor]:  # noqa: ANN401 -- made from a spec alone
    """Return the Ray actor for a plug-in's kind of engine."""

    class PluginEngineActor(EngineActor, server):
        """Ray actor of a plug-in's engine."""

        def __init__(self, spec: EngineSpec) -> None:
            set_up_files(spec.name, spec.run_dir, spec.sharing)
            server.__init__(self, spec)

    return PluginEngineActor
