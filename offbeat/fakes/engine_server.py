"""Server of the stub engine, for dry runs without torch."""

import time
from collections.abc import Callable

from offbeat.fakes.engine import StubEngine
from offbeat.generators.engine_server import EngineServer, LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.spec import EngineSpec
from offbeat.telemetry.logs import new_incarnation
from offbeat.weight_sync.canary import invent_answers


class StubEngineServer(EngineServer):
    """Server of a latency model that also models the time to load weights."""

    def __init__(
        self,
        spec: EngineSpec,
        incarnation: str | None = None,
        *,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Create the engine. ``incarnation`` is its unique name, or None for a new name."""
        incarnation = incarnation or new_incarnation(spec.name)
        self._stub = StubEngine(spec.stub, name=spec.name, incarnation=incarnation, seed=spec.seed)
        super().__init__(spec, self._stub, incarnation, cpu_clock=cpu_clock)

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        version, gap = incoming.release.version, None
        if incoming.is_initial:
            await self._stub.set_version(version)
            return LoadOutcome(0.0, None)
        chunks, started_s = await incoming.bring_whole(), time.perf_counter()
        if (canary := incoming.release.manifest.canary) is not None:
            answers = invent_answers(bytes(chunks[0]).hex())  # all weights of a stub: 16 bytes
            gap = self._canaries.check(canary, answers, epoch=incoming.epoch, version=version)
        await self._stub.set_version(version)
        return LoadOutcome(time.perf_counter() - started_s, gap)
