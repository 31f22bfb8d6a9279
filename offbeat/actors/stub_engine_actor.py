"""Ray actor of the stub engine: dry runs, without torch."""

import time

from offbeat.actors.engine_actor import EngineActor, TakenRelease
from offbeat.actors.ray_run_files import prepared
from offbeat.generators.spec import EngineSpec
from offbeat.generators.stub import StubEngine
from offbeat.messages.weights import WeightRelease
from offbeat.telemetry.process import new_incarnation
from offbeat.weight_sync.canary import invented_answers
from offbeat.weight_sync.manifest import Bytes


class StubEngineActor(EngineActor):
    """Stub engine: a latency model that also takes time to load weights."""

    def __init__(self, spec: EngineSpec) -> None:
        prepared(spec.name, spec.run_dir, spec.sharing)
        incarnation = new_incarnation(spec.name)
        self._stub = StubEngine(spec.stub, name=spec.name, incarnation=incarnation, seed=spec.seed)
        super().__init__(spec, self._stub, incarnation)

    async def _name_loaded(self, epoch: int, version: int) -> None:
        del epoch  # it has no cache that outlives a version
        await self._stub.set_version(version)

    async def _take(
        self, epoch: int, release: WeightRelease, chunks: tuple[Bytes, ...]
    ) -> TakenRelease:
        started_s, version, gap = time.perf_counter(), release.version, None
        if (canary := release.manifest.canary) is not None:
            answers = invented_answers(bytes(chunks[0]).hex())  # all of a stub's weights
            gap = self._canaries.check(canary, answers, epoch=epoch, version=version)
        await self._stub.set_version(version)
        return TakenRelease(time.perf_counter() - started_s, gap)
