"""Server of the stub engine: dry runs, without torch."""

import time
from collections.abc import Callable

from offbeat.fakes.engine import StubEngine
from offbeat.generators.engine_server import EngineServer, LoadOutcome
from offbeat.generators.spec import EngineSpec
from offbeat.messages.weights import WeightRelease
from offbeat.telemetry.process import new_incarnation
from offbeat.weight_sync.canary import invented_answers
from offbeat.weight_sync.manifest import Bytes


class StubEngineServer(EngineServer):
    """Server of a latency model that also takes time to load weights."""

    def __init__(
        self,
        spec: EngineSpec,
        incarnation: str | None = None,
        *,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Create the engine. ``incarnation`` is its unique name; None for a new one."""
        incarnation = incarnation or new_incarnation(spec.name)
        self._stub = StubEngine(spec.stub, name=spec.name, incarnation=incarnation, seed=spec.seed)
        super().__init__(spec, self._stub, incarnation, cpu_clock=cpu_clock)

    async def _set_loaded_version(self, epoch: int, version: int) -> None:
        del epoch  # no cache outlives a version
        await self._stub.set_version(version)

    async def _load_release(
        self, epoch: int, release: WeightRelease, chunks: tuple[Bytes, ...]
    ) -> LoadOutcome:
        started_s, version, gap = time.perf_counter(), release.version, None
        if (canary := release.manifest.canary) is not None:
            answers = invented_answers(bytes(chunks[0]).hex())  # all of a stub's weights: 16 bytes
            gap = self._canaries.check(canary, answers, epoch=epoch, version=version)
        await self._stub.set_version(version)
        return LoadOutcome(time.perf_counter() - started_s, gap)
