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

from offbeat.actors.call import RemoteBug
from offbeat.actors.call_batching import BatchedReply, ReplyBatcher
from offbeat.actors.fence_guard import FenceGuard
from offbeat.actors.transports import make_receiver
from offbeat.generators.spec import EngineSpec
from offbeat.generators.weight_fetch import WeightFetcher, in_thread
from offbeat.messages.failures import (
    CanaryFailed,
    EngineUnavailable,
    OffbeatError,
    ReleaseLost,
    WeightSyncFailed,
)
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.text import first_line
from offbeat.messages.weights import EngineState, WeightDelta, WeightsAck
from offbeat.weight_sync.canary import CanaryChecks
from offbeat.weight_sync.delta import KeptBase, check_delta, rebuilt
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
        self._fetcher = WeightFetcher(spec.name, make_receiver, device or "cpu")
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

    async def load_weights(
        self,
        fence: Fence,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        *handles: Bytes | ShardRoute,
    ) -> WeightsAck:
        """Load a release completely, or raise and keep serving the previous one.

        Args:
            fence: Fence of the caller.
            epoch: Epoch of the transfer.
            version: Version of the release.
            digest: Digest of the release.
            manifest: Manifest of the release.
            *handles: The chunks of the release, or the route to the trainer ranks that hold its parts.

        Raises:
            ReleaseLost: The ranks that hold a part have ended, or send another release.
            WeightSyncFailed: The release did not fit, arrived damaged, or could not be fetched.
        """
        self._begin(fence, epoch, version)
        started_s = time.perf_counter()
        with self._transfer(epoch, version):
            if (route := _route_in(handles)) is not None:
                taken = await self._take_parts(epoch, version, digest, manifest, route)
                if taken is not None:
                    return self._acked(started_s, epoch, version, digest, manifest, taken)
                chunks = await self._fetcher.fetch_on_host(route, epoch, manifest)
            else:
                chunks = cast("tuple[Bytes, ...]", handles)
        return await self._served_from_buckets(started_s, epoch, version, digest, manifest, chunks)

    async def load_delta(
        self,
        fence: Fence,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        delta: WeightDelta,
        *handles: Bytes | ShardRoute,
    ) -> WeightsAck:
        """Load a release by what it changes of the one that this engine serves.

        Args:
            fence: Fence of the caller.
            epoch: Epoch of the transfer.
            version: Version of the release.
            digest: Digest of the release.
            manifest: Manifest of the release.
            delta: The changes, without handles.
            *handles: The chunks of the delta, or the route to the trainer ranks that hold its parts.

        Raises:
            BaseRefused: The engine serves another release. Nothing was begun: the full release may
                follow.
            ReleaseLost, WeightSyncFailed: As ``load_weights``.
        """
        started_s = time.perf_counter()
        self._guard.check(fence)
        base = self._kept_base.check(version, delta.base, self._digest)
        self._begin(fence, epoch, version)
        with self._transfer(epoch, version):
            if (route := _route_in(handles)) is not None:
                taken = await self._take_parts(epoch, version, digest, manifest, route, delta)
                if taken is not None:
                    return self._acked(started_s, epoch, version, digest, manifest, taken)
                parts = await self._fetcher.fetch_on_host(route, epoch, delta.manifest, manifest)
            else:
                parts = cast("tuple[Bytes, ...]", handles)

            def rebuild() -> tuple[Bytes, ...]:
                check_delta(epoch, delta, parts)
                return rebuilt(epoch, base, manifest, parts, self._kept_base.lend)

            chunks = await in_thread(f"delta {epoch}", rebuild)
        return await self._served_from_buckets(started_s, epoch, version, digest, manifest, chunks)

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
        await self._name_loaded(epoch, version)
        self._version, self._digest = version, digest
        return WeightsAck(
            engine=self._name,
            incarnation=self._incarnation,
            epoch=epoch,
            version=version,
            digest=digest,
            transfer_s=time.perf_counter() - started_s,
            pause_s=0.0,
            busy_s=self._served.busy_s,
            tokens=self._served.tokens,
            cpu_s=time.process_time(),
        )

    async def _name_loaded(self, epoch: int, version: int) -> None:
        """Stamp tokens of the loaded weights with this version from here on.

        Raises:
            WeightSyncFailed: The engine has other weights by now.
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
        except (TransferFailed, TransferRefused) as failure:
            raise WeightSyncFailed(self._name, epoch, version, str(failure)) from failure

    async def _served_from(
        self,
        started_s: float,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        chunks: tuple[Bytes, ...],
        content: str = "",
    ) -> WeightsAck:
        """Load the chunks and ack ``digest``; ``content``: the digest of the chunks, if another."""
        try:
            taken = await self._take(epoch, version, content or digest, manifest, chunks)
        except CanaryFailed:
            self._version = self._digest = None  # the old weights are overwritten
            raise
        if self._keeps_base:
            self._kept_base.serves(digest, manifest, chunks)
        return self._acked(started_s, epoch, version, digest, manifest, taken)

    async def _served_from_buckets(
        self,
        started_s: float,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        buckets: tuple[Bytes, ...],
    ) -> WeightsAck:
        """Load buckets and ack; a loader that takes no regions gets whole tensors made of them."""
        if self._takes_regions or not manifest.pieces:
            return await self._served_from(started_s, epoch, version, digest, manifest, buckets)
        whole = await self._fetcher.joined(manifest, digest, buckets, self._whole_because())
        ack = await self._served_from(
            started_s, epoch, version, digest, whole.manifest, whole.chunks, whole.digest
        )
        if self._keeps_base:
            self._kept_base.serves(digest, manifest, buckets)
        return ack

    def _acked(
        self,
        started_s: float,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        taken: TakenRelease,
    ) -> WeightsAck:
        """Serve what was taken from here on; return the ack."""
        self._version, self._digest, self._manifest = version, digest, manifest
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
        self, epoch: int, version: int, digest: str, manifest: Manifest, chunks: tuple[Bytes, ...]
    ) -> TakenRelease:
        """Load, verify and commit a release, and check its canary, if it has one.

        Raises:
            WeightSyncFailed: It did not fit, or arrived damaged: the engine serves the previous
                version.
            CanaryFailed: The engine computes other values: it serves nothing, and its requests are
                lost.
        """
        raise NotImplementedError

    async def _take_parts(
        self,
        epoch: int,
        version: int,
        digest: str,
        manifest: Manifest,
        route: ShardRoute,
        delta: WeightDelta | None = None,
    ) -> TakenRelease | None:
        """Fetch, verify and commit regions of tensors as they are; None: this process loads buckets.

        ``delta``: what the route sends, where it is what the release changes of the served one.

        Raises:
            TransferFailed, WeightSyncFailed, CanaryFailed: As ``load_weights`` and ``_take``.
        """
        del epoch, version, digest, manifest, route, delta

    def _whole_because(self) -> str:
        return "the loader of this engine takes whole tensors, no regions"


def _route_in(handles: Sequence[Bytes | ShardRoute]) -> ShardRoute | None:
    """Return the route of a release that is fetched from trainer ranks, else None."""
    first = handles[0] if handles else None
    return first if isinstance(first, ShardRoute) else None
