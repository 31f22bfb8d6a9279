"""Base of all engine actors: fence, weights, health. One actor is one engine.

An engine serves no version until a release was received, verified and committed; its ack contains
the version and the digest that it then serves.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, cast

from offbeat.actors.call_batching import BatchedReply, ReplyBatcher
from offbeat.generators.spec import EngineSpec
from offbeat.generators.weight_fetch import WeightFetcher, in_thread
from offbeat.messages.failures import (
    CanaryFailed,
    EngineUnavailable,
    OffbeatError,
    ReleaseLost,
    RemoteBug,
    WeightSyncFailed,
)
from offbeat.messages.fence_guard import FenceGuard
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.text import first_line
from offbeat.messages.weights import EngineState, WeightDelta, WeightRelease, WeightsAck
from offbeat.weight_sync.canary import CanaryChecks
from offbeat.weight_sync.delta import HeldRelease, KeptBase, check_delta, rebuilt
from offbeat.weight_sync.errors import SenderGone, TransferFailed, TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.served import ServedWeights, loaded_digest
from offbeat.weight_sync.transports.messages import ShardRoute


class ServedEngine(Protocol):
    """Interface that all kinds of engine share."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    def check_usable(self, during: str) -> None: ...
    async def generate(self, request: GenerateRequest) -> GenerateResult: ...
    async def close(self) -> None: ...


class TakenRelease(NamedTuple):
    """Outcome of receiving a release."""

    pause_s: float  # seconds that decoding was paused, the canary included
    canary_gap: float | None  # nats; None: the release has no canary


class EngineActor:
    """Base class of engine actors: fence, state and acks. Subclasses load the weights. Async."""

    _takes_regions = False  # whether ``_take`` takes chunks that hold regions of tensors
    # Failures of a transfer that leave the served weights as they were
    _refusals: tuple[type[OffbeatError], ...] = (TransferFailed, TransferRefused)

    def __init__(
        self, spec: EngineSpec, served: ServedEngine, incarnation: str, device: str | None = None
    ) -> None:
        """``device``: where this process itself can receive weights; None: into main memory."""
        self._name, self._served, self._incarnation = spec.name, served, incarnation
        self._canaries = CanaryChecks(spec.name)
        self._model_path = spec.model.path
        self._guard = FenceGuard(spec.name)
        self._requests = ReplyBatcher(self._generate, self._as_failure)
        self._epoch = 0  # epoch of the newest transfer begun
        self._fetcher = WeightFetcher(spec.name, device or "cpu")
        self._keeps_base, self._kept_base = spec.keeps_base, KeptBase(spec.name)
        self._version: int | None = None
        self._digest: str | None = None
        self._manifest: Manifest | None = None  # of the served release

    async def exchange(
        self,
        worker: str,
        incarnation: str,
        requests: Sequence[tuple[int, GenerateRequest]],
        cancelled: Sequence[int],
        doubted: Sequence[int] = (),
    ) -> list[BatchedReply[GenerateResult]]:
        """Generate for an environment worker; see ``offbeat.actors.call_batching``."""
        return await self._requests.exchange(worker, incarnation, requests, cancelled, doubted)

    async def state(self, fence: Fence) -> EngineState:
        """Return the engine's state.

        Raises:
            EngineUnavailable: The process is alive, but the engine in it is not.
        """
        self._guard.check(fence)
        self._served.check_usable("say how it is")
        served = self._served
        return EngineState(
            name=self._name,
            incarnation=self._incarnation,
            version=self._version,
            digest=self._digest,
            running=served.running,
            waiting=served.waiting,
            busy_s=served.busy_s,
            tokens=served.tokens,
            pid=os.getpid(),
            cpu_s=time.process_time(),
        )

    async def served_weights(self) -> ServedWeights:
        """Return which weights the engine serves, for ``offbeat verify-weights``.

        It changes nothing, so it needs no fence.
        """
        version, manifest = self._version, self._manifest
        if version is None or manifest is None:
            return ServedWeights(self._name, version)
        return await self._read_back(version, manifest)

    async def _read_back(self, version: int, manifest: Manifest) -> ServedWeights:
        """Return the release with digests of the served tensors, or why there are none."""
        problem = "this kind of engine cannot read back the weights that it serves"
        return ServedWeights(self._name, version, manifest, problem=problem)

    async def load(
        self, fence: Fence, epoch: int, release: WeightRelease, *handles: Bytes | ShardRoute
    ) -> WeightsAck:
        """Load a release completely, or raise and keep serving the previous one.

        Args:
            fence: Fence of the caller.
            epoch: Epoch of the transfer.
            release: The release without handles. With a delta, it is loaded by its changes.
            *handles: The chunks of the release or of its delta, or the route to the trainer ranks
                that hold its parts.

        Raises:
            BaseRefused: The engine does not serve the base of the delta. Nothing was begun: the full
                release may follow.
            ReleaseLost: The ranks that hold a part have ended, or send another release.
            WeightSyncFailed: The release did not fit, arrived damaged, or could not be fetched.
        """
        started_s, delta, base = time.perf_counter(), release.delta, None
        self._guard.check(fence)
        if delta is not None:
            base = self._kept_base.check(release.version, delta.base, self._digest)
        self._begin(fence, epoch, release.version)
        with self._transfer(epoch, release.version):
            route = handles[0] if handles and isinstance(handles[0], ShardRoute) else None
            taken = None if route is None else await self._take_parts(epoch, release, route)
            if taken is not None:
                self._manifest = release.manifest
            else:
                parts = cast("tuple[Bytes, ...]", handles)
                if route is not None:
                    sent = release.manifest if delta is None else delta.manifest
                    parts = await self._fetcher.fetch_on_host(route, epoch, sent, release.manifest)
                if delta is not None and base is not None:
                    parts = await self._rebuilt(epoch, release, delta, base, parts)
                taken = await self._take_whole(epoch, release, parts)
        return self._acked(started_s, epoch, release.version, release.digest, taken)

    async def _rebuilt(
        self,
        epoch: int,
        release: WeightRelease,
        delta: WeightDelta,
        base: HeldRelease,
        parts: tuple[Bytes, ...],
    ) -> tuple[Bytes, ...]:
        """Return the chunks of a release, from its base and the chunks of its delta."""

        def rebuild() -> tuple[Bytes, ...]:
            check_delta(epoch, delta, parts)
            return rebuilt(epoch, base, release.manifest, parts, self._kept_base.lend)

        return await in_thread(f"delta {epoch}", rebuild)

    async def _take_whole(
        self, epoch: int, release: WeightRelease, chunks: tuple[Bytes, ...]
    ) -> TakenRelease:
        """Take all chunks; a loader that takes no regions gets whole tensors made of them."""
        whole, parts = release, chunks
        if release.manifest.pieces and not self._takes_regions:
            because = self._whole_because()
            whole = await self._fetcher.joined(release, chunks, because)
            parts = whole.chunks
        taken = await self._take(epoch, whole, parts)
        self._manifest = whole.manifest
        if self._keeps_base:
            self._kept_base.serves(release.digest, release.manifest, chunks)
        return taken

    async def serve_loaded(self, fence: Fence, epoch: int, version: int) -> WeightsAck:
        """Serve the weights of the model directory, which this process was created with.

        The ack has the digest of their files. For evaluations without a trainer.

        Raises:
            WeightSyncFailed: A release has taken their place, or the files cannot be read.
        """
        self._begin(fence, epoch, version)
        started_s = time.perf_counter()
        if self._version not in (None, version):
            problem = f"a release took the place of the loaded weights: version {self._version}"
            raise WeightSyncFailed(self._name, epoch, version, problem)
        loop = asyncio.get_running_loop()
        try:
            digest = await loop.run_in_executor(None, loaded_digest, self._model_path)
        except OSError as error:
            raise WeightSyncFailed(self._name, epoch, version, str(error)) from error
        with self._transfer(epoch, version):
            await self._name_loaded(epoch, version)
        return self._acked(started_s, epoch, version, digest, TakenRelease(0.0, None))

    async def _name_loaded(self, epoch: int, version: int) -> None:
        """Stamp tokens of the loaded weights with this version from here on.

        Raises:
            TransferRefused: The engine has other weights by now.
        """
        raise NotImplementedError

    def _begin(self, fence: Fence, epoch: int, version: int) -> None:
        self._guard.check(fence)
        if epoch <= self._epoch:
            problem = f"a newer transfer was begun: epoch {self._epoch}"
            raise WeightSyncFailed(self._name, epoch, version, problem)
        self._epoch = epoch

    @contextlib.contextmanager
    def _transfer(self, epoch: int, version: int) -> Generator[None]:
        """Raise the failures of a transfer as those that the controller knows."""
        try:
            yield
        except SenderGone as gone:
            raise ReleaseLost(self._name, version, str(gone)) from gone
        except self._refusals as failure:
            raise WeightSyncFailed(self._name, epoch, version, str(failure)) from failure
        except CanaryFailed:
            self._version = self._digest = None  # the old weights are overwritten
            raise

    def _acked(
        self, started_s: float, epoch: int, version: int, digest: str, taken: TakenRelease
    ) -> WeightsAck:
        """Start serving the loaded weights and return their ack."""
        self._version, self._digest = version, digest
        return WeightsAck(
            engine=self._name,
            incarnation=self._incarnation,
            epoch=epoch,
            version=version,
            digest=digest,
            transfer_s=time.perf_counter() - started_s - taken.pause_s,
            pause_s=taken.pause_s,
            busy_s=self._served.busy_s,
            tokens=self._served.tokens,
            cpu_s=time.process_time(),
            canary_gap=taken.canary_gap,
        )

    async def close(self) -> None:
        await self._requests.close()
        await self._served.close()

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate, but only with weights of this run.

        A restarted process has the weights that it was created with.
        """
        if self._version is None:
            problem = "it holds no weights of this run"
            raise EngineUnavailable(self._name, "generate", problem, "Sync it first")
        return await self._served.generate(request)

    def _as_failure(self, error: Exception) -> OffbeatError:
        """Return a typed failure as it is; any other error is a bug of the engine."""
        if isinstance(error, OffbeatError):
            return error
        return RemoteBug(self._name, "generate", type(error).__name__, first_line(error))

    async def _take(
        self, epoch: int, release: WeightRelease, chunks: tuple[Bytes, ...]
    ) -> TakenRelease:
        """Load, verify and commit a release, and check its canary, if it has one.

        Raises:
            TransferRefused: It did not fit, or arrived damaged: the engine serves the previous
                version.
            CanaryFailed: The engine computes other values: it serves nothing, and its requests are
                lost.
        """
        raise NotImplementedError

    async def _take_parts(
        self, epoch: int, release: WeightRelease, route: ShardRoute
    ) -> TakenRelease | None:
        """Fetch, verify and commit the regions of a release, or of its delta.

        Return None if this process loads chunks.

        Raises:
            TransferFailed, TransferRefused, CanaryFailed: As ``load`` and ``_take``.
        """
        del epoch, release, route

    def _whole_because(self) -> str:
        return "the loader of this engine takes whole tensors, no regions"
