"""Ray actor of the embedded engine."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from offbeat.actors.engine_actor import EngineActor, TakenRelease
from offbeat.actors.ray_run_files import prepared
from offbeat.config.base import of_kind
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.generators.spec import EngineSpec
from offbeat.messages.weights import WeightRelease
from offbeat.telemetry.process import new_incarnation
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.served import ServedWeights, loaded_digest
from offbeat.weight_sync.transports.messages import ShardRoute

if TYPE_CHECKING:
    from offbeat.generators.embedded.engine import EmbeddedEngine
    from offbeat.weight_sync.adapter import BaseWeights
    from offbeat.weight_sync.chunks import BucketMemory
    from offbeat.weight_sync.fingerprints import ReadBack
    from offbeat.weight_sync.receiver import Receiver


class EmbeddedEngineActor(EngineActor):
    """The embedded engine. Weights are swapped in place between two decode steps."""

    _takes_regions = True

    def __init__(self, spec: EngineSpec) -> None:
        from offbeat.generators.embedded.start import started

        prepared(spec.name, spec.run_dir, spec.sharing)
        incarnation = new_incarnation(spec.name)
        self._loop, self._module = started(spec, incarnation)
        self._base: BaseWeights | None = None  # kept from the first release of adapters on
        self._is_replaced = False  # a full release was begun: the loaded weights may be gone
        # Layout and receiver of the last transfer, which caches the checks of its manifest
        self._last: tuple[str, Receiver, Callable[[], ReadBack]] | None = None
        # Version and manifest of what the engine serves, and how it is read: the engine's thread's
        self._committed: tuple[int, Manifest, Callable[[], ReadBack]] | None = None
        config = of_kind(EmbeddedGeneratorConfig, spec.generator)
        super().__init__(spec, self._loop, incarnation, config.device)

    async def _name_loaded(self, epoch: int, version: int) -> None:
        del epoch  # it has no cache that outlives a version
        await self._loop.between_steps(lambda engine: engine.set_version(version))

    async def _take_parts(
        self, epoch: int, release: WeightRelease, route: ShardRoute
    ) -> TakenRelease | None:
        if self._keeps_base:
            return None  # deltas travel between main memories, and so do their bases
        buckets = await self._fetcher.fetch_buckets(route, epoch, release.manifest)
        return await self._take(epoch, release, buckets)

    async def _take(
        self, epoch: int, release: WeightRelease, chunks: "Sequence[BucketMemory]"
    ) -> TakenRelease:
        manifest: Manifest = release.manifest
        version, given_up = release.version, threading.Event()
        receiver, read_back = await self._receiver_of(epoch, manifest)
        receiver.begin(epoch, manifest)
        for index, chunk in enumerate(chunks):
            receiver.apply(epoch, index, chunk)
        receiver.verify(release.digest)

        def commit(engine: "EmbeddedEngine") -> TakenRelease:
            started_s, canary, gap = time.perf_counter(), manifest.canary, None
            if not given_up.is_set():
                receiver.commit(version)
                self._committed = version, manifest, read_back
                if canary is not None:
                    try:
                        answers = engine.greedy(canary.prompts)
                        gap = self._canaries.check(canary, answers, epoch=epoch, version=version)
                    except Exception as failure:
                        engine.lose(str(failure))
                        raise
                engine.set_version(version)
            return TakenRelease(time.perf_counter() - started_s, gap)

        try:
            taken = await self._loop.between_steps(commit)
        except asyncio.CancelledError:
            given_up.set()
            raise
        except Exception as failure:
            self._loop.lose(str(failure))
            self._version = self._digest = None  # the old weights are overwritten
            raise
        self._last = manifest.digest, receiver, read_back
        return taken

    async def _read_back(self, version: int, manifest: Manifest) -> ServedWeights:
        from offbeat.weight_sync.verification import packed_again

        del version, manifest  # the engine's thread may have committed another release meanwhile

        def read(engine: "EmbeddedEngine") -> ServedWeights:
            del engine
            if self._committed is None:
                return ServedWeights(self._name, None)
            version, manifest, read_back = self._committed
            tensors, differences = read_back()
            digests, prints = packed_again(manifest, tensors)
            return ServedWeights(self._name, version, manifest, digests, prints, differences)

        return await self._loop.between_steps(read)

    async def _receiver_of(
        self, epoch: int, manifest: Manifest
    ) -> "tuple[Receiver, Callable[[], ReadBack]]":
        """Return the receiver of the last completed transfer, if its layout was this, or another.

        With it, how the weights that it loaded are read back.

        A cancelled transfer may still wait for the engine's thread with its chunks staged, and must
        not mix with those of another.

        Raises:
            TransferRefused: Adapters that were trained on another model than this engine has.
        """
        from offbeat.weight_sync.adapter import AdapterTarget, BaseWeights, check_base
        from offbeat.weight_sync.receiver import ModuleTarget, Receiver

        last, self._last = self._last, None
        if last is not None and last[0] == manifest.digest:
            return last[1:]
        if manifest.adapter is None:
            self._is_replaced = True
            module = ModuleTarget(self._module)
            return Receiver(module, self._name), module.read_back
        if self._is_replaced:
            raise TransferRefused(epoch, "base of the adapters", "a full release", "as loaded")
        if self._base is None:
            self._base = BaseWeights(self._module, await self._loaded_digest(epoch))
        check_base(epoch, self._base, manifest)
        adapters = AdapterTarget(self._base, manifest)
        return Receiver(adapters, self._name), partial(adapters.read_back, self._base)

    async def _loaded_digest(self, epoch: int) -> str:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(None, loaded_digest, self._model_path)
        except OSError as error:
            raise TransferRefused(epoch, "digest of the model", str(error), "readable") from error
