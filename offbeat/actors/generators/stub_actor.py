"""The Ray actor of the stub engine: dry runs, without torch."""

import time

from offbeat.actors.generators.engine_actor import EngineActor, EngineSpec
from offbeat.actors.generators.stub import StubEngine
from offbeat.actors.process import incarnation
from offbeat.actors.ray_run_files import prepared
from offbeat.weight_sync.manifest import Bytes, Manifest


class StubEngineActor(EngineActor):
    """A latency model; it takes weights by taking time."""

    def __init__(self, spec: EngineSpec) -> None:
        prepared(spec.name, spec.run_dir, spec.sharing)
        life = incarnation(spec.name)
        self._stub = StubEngine(spec.stub, name=spec.name, incarnation=life, seed=spec.seed)
        super().__init__(spec, self._stub, life)

    async def _take(
        self, epoch: int, version: int, digest: str, manifest: Manifest, chunks: tuple[Bytes, ...]
    ) -> float:
        del epoch, digest, manifest, chunks
        started_s = time.perf_counter()
        await self._stub.set_version(version)
        return time.perf_counter() - started_s
