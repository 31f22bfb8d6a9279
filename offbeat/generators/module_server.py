"""Server of an engine with a torch module. It swaps the weights between two steps.

    event loop       orders the releases
    a thread         checks layout and digests, adds adapters to matrices     decoding continues
    engine's thread  commits and checks the canary between two steps          decoding waits

torch is imported only when the first release arrives, because every process with a handle to the
engine's actor imports this module.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.generators.engine_server import EngineServer, LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import EngineUnavailable, ReleaseLost
from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.background import in_thread
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.served import ServedWeights, digest_loaded

if TYPE_CHECKING:
    from torch import nn

    from offbeat.generators.engine_loop import EngineLoop, SteppedEngine
    from offbeat.weight_sync.chunks import BucketMemory
    from offbeat.weight_sync.fingerprints import ReadBack
    from offbeat.weight_sync.receiver import LoadedWeights, Receiver


class ReleaseLoader(NamedTuple):
    """Receiver of the releases of one layout, and a function that reads back its weights."""

    receiver: "Receiver"
    read_back: "Callable[[], ReadBack]"


class _Committed(NamedTuple):
    """Release that the engine serves."""

    version: int
    manifest: Manifest
    read_back: "Callable[[], ReadBack]"


class ModuleEngineServer(EngineServer):
    """Server of an engine in this process. A subclass per kind of engine creates the engine."""

    def __init__(
        self,
        spec: EngineSpec,
        engine: "EngineLoop[Any]",
        module: "nn.Module",
        incarnation: str,
        device: str = "cpu",
        *,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Serve an engine.

        Args:
            spec: Specification of the engine.
            engine: The loop that runs the engine.
            module: Module of the engine. Releases contain its tensors under its names.
            incarnation: Unique name of this incarnation of the engine.
            device: Device of the module.
            cpu_clock: Returns the CPU seconds of the engine.
        """
        self._engine, self._module = engine, module
        self._base: LoadedWeights | None = None  # kept from the first release of adapters on
        self._is_replaced = False  # a full release was begun, so the loaded weights may be gone
        self._staging = asyncio.Lock()
        # Layout and loader of the last transfer. The receiver caches the checks of its manifest.
        self._last: tuple[str, ReleaseLoader] | None = None
        self._committed: _Committed | None = None  # used only by the engine's thread
        super().__init__(spec, engine, incarnation, device, cpu_clock=cpu_clock)

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        epoch, release = incoming.epoch, incoming.release
        if incoming.is_initial:  # no cache outlives a version
            await self._engine.between_steps(lambda engine: engine.set_version(release.version))
            return LoadOutcome(0.0, None)
        chunks = await incoming.bring()
        async with self._staging:
            loader = await self._get_loader(epoch, release.manifest)
            await self._stage(epoch, release, chunks, loader.receiver)
        self._check_newest(epoch)  # nothing is awaited from here to the queue of the thread
        swap = _swap(loader.receiver, release.version)
        outcome = await self._commit(epoch, release, swap, loader.read_back)
        self._last = release.manifest.digest, loader
        return outcome

    async def _stage(
        self,
        epoch: int,
        release: WeightRelease,
        chunks: "Sequence[BucketMemory]",
        receiver: "Receiver",
    ) -> None:
        """Verify a release and stage it next to the served weights, in a thread.

        A cancelled call stops at the next chunk and waits for its thread.

        Raises:
            TransferRefused: The release did not fit, or arrived damaged.
        """
        cancelled = threading.Event()

        def stage() -> None:
            receiver.begin(epoch, release.manifest)
            for index, chunk in enumerate(chunks):
                if cancelled.is_set():
                    return
                receiver.apply(epoch, index, chunk)
            receiver.verify(release.digest)

        staging = asyncio.ensure_future(in_thread(f"weights {epoch}", stage))
        try:
            await asyncio.shield(staging)
        except asyncio.CancelledError:
            cancelled.set()
            # Wait, so that the next release is not staged at the same time: both would read the
            # base
            await asyncio.gather(staging, return_exceptions=True)
            raise

    async def _commit(
        self,
        epoch: int,
        release: WeightRelease,
        swap: AbstractContextManager[None],
        read_back: "Callable[[], ReadBack]",
    ) -> LoadOutcome:
        """Swap the weights in the engine's thread and check the canary there.

        Args:
            epoch: Epoch of the transfer.
            release: The release, with the canary.
            swap: Context that gives the engine the weights of the release. Entering it raises
                ``EngineUnavailable`` or ``ReleaseLost`` if the served weights stay in place.
            read_back: Reads back the weights of the release.
        """
        manifest: Manifest = release.manifest
        version, cancelled = release.version, threading.Event()

        def commit(engine: "SteppedEngine") -> LoadOutcome:
            started_s, canary, gap = time.perf_counter(), manifest.canary, None
            if cancelled.is_set():
                return LoadOutcome(time.perf_counter() - started_s, gap)
            with swap:
                self._committed = _Committed(version, manifest, read_back)
                if canary is not None:
                    try:
                        answers = engine.greedy(canary.prompts)
                        gap = self._canaries.check(canary, answers, epoch=epoch, version=version)
                    except Exception as failure:
                        engine.lose(str(failure))
                        raise
                engine.set_version(version)
            return LoadOutcome(time.perf_counter() - started_s, gap)

        try:
            return await self._engine.between_steps(commit)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        except (EngineUnavailable, ReleaseLost):
            raise
        except Exception as failure:
            self._engine.lose(str(failure))
            self._version = self._digest = None  # the old weights are overwritten
            raise

    async def _read_back(self, version: int, manifest: Manifest) -> ServedWeights:
        del version, manifest  # the engine's thread may have committed another release by now

        def read(engine: "SteppedEngine") -> ServedWeights:
            from offbeat.weight_sync.fingerprints import fingerprint_release

            del engine
            if self._committed is None:
                return ServedWeights(self._name, None)
            version, manifest, read_back = self._committed
            tensors, differences = read_back()
            digests, prints = fingerprint_release(manifest, tensors)
            return ServedWeights(self._name, version, manifest, digests, prints, differences)

        return await self._engine.between_steps(read)

    async def _get_loader(self, epoch: int, manifest: Manifest) -> ReleaseLoader:
        """Return the loader of the last completed transfer if it had this layout, else a new one.

        A cancelled transfer may have staged its chunks and still wait for the engine's thread. So
        its loader must not be used for another transfer.

        Raises:
            TransferRefused: The adapters were trained on a different model than this engine has.
        """
        last, self._last = self._last, None
        if last is not None and last[0] == manifest.digest:
            return last[1]
        if manifest.adapter is None:
            self._is_replaced = True
            return await in_thread("loader", self._make_module_loader)
        if self._is_replaced:
            raise TransferRefused(epoch, "base of the adapters", "a full release", "as loaded")
        if self._base is None:
            self._base = await in_thread(
                "base", partial(self._open_base, epoch, manifest.adapter.kind)
            )
        make = partial(self._make_loader_of_additions, epoch, self._base, manifest)
        return await in_thread("loader", make)

    def _make_module_loader(self) -> ReleaseLoader:
        from offbeat.weight_sync.receiver import ModuleTarget, Receiver

        target = ModuleTarget(self._module)
        return ReleaseLoader(Receiver(target, self._name), target.read_back)

    def _make_loader_of_additions(
        self, epoch: int, base: "LoadedWeights", manifest: Manifest
    ) -> ReleaseLoader:
        from offbeat.weight_sync.receiver import Receiver

        target, read_back = base.make_target(epoch, manifest)
        return ReleaseLoader(Receiver(target, self._name), read_back)

    def _open_base(self, epoch: int, kind: str) -> "LoadedWeights":
        """Return the base weights for adapters, before any release replaces them."""
        from offbeat.weight_sync.receiver import find_release_kind

        try:
            digest = digest_loaded(self._model_path)
        except OSError as error:
            raise TransferRefused(epoch, "digest of the model", str(error), "readable") from error
        return find_release_kind(kind).open_base(self._module, digest)


@contextmanager
def _swap(receiver: "Receiver", version: int) -> Generator[None]:
    """Commit the staged weights of the receiver."""
    receiver.commit(version)
    yield
