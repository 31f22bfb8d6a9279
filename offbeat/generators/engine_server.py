"""Base of all engine servers: requests, fence, weights, health. One server has one engine.

An engine serves no version until it has received, verified and committed a release. Its ack names
the version and the digest that it then serves.
"""

import contextlib
import os
import time
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol, cast

from offbeat.generators.incoming import IncomingRelease, WeightFetcher
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import (
    CanaryFailed,
    EngineUnavailable,
    OffbeatError,
    ReleaseLost,
    RemoteBug,
    WeightSyncFailed,
)
from offbeat.messages.fences import Fence, FenceGuard
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.text import first_line
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from offbeat.weight_sync.background import in_thread
from offbeat.weight_sync.canary import CanaryChecks
from offbeat.weight_sync.delta_plugin import keep_release
from offbeat.weight_sync.errors import SenderGone, TransferFailed, TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.served import ServedWeights, digest_loaded
from offbeat.weight_sync.transport import ReleaseHandle


class ServedEngine(Protocol):
    """Common interface of all kinds of engine."""

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


class LoadOutcome(NamedTuple):
    """Outcome of loading a release."""

    pause_s: float  # seconds for which decoding was paused, including the canary
    canary_gap: float | None  # nats; None: the release has no canary


class EngineServer:
    """Base class of engine servers: fence, state and acks. Subclasses load the weights.

    All methods belong to one event loop. Blocking work runs in threads.
    """

    # Failures of a transfer that leave the served weights unchanged
    _transfer_failures: tuple[type[OffbeatError], ...] = (TransferFailed, TransferRefused)

    def __init__(
        self,
        spec: EngineSpec,
        served: ServedEngine,
        incarnation: str,
        device: str | None = None,
        *,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Serve an engine.

        Args:
            spec: Specification of the engine.
            served: The engine.
            incarnation: Unique name of this incarnation of the engine.
            device: Device into which this process can receive weights, or None for main memory.
            cpu_clock: Returns the CPU seconds of the engine.
        """
        self._cpu_clock = cpu_clock
        self._name, self._served, self._incarnation = spec.name, served, incarnation
        self._canaries = CanaryChecks(spec.name)
        self._model_path = spec.model.path
        self._guard = FenceGuard(spec.name)
        self._epoch = 0  # epoch of the newest transfer begun
        self._fetcher = WeightFetcher(spec.name, device or "cpu", keeps_base=spec.keeps_base)
        self._kept_base = keep_release(spec.name, delta=spec.keeps_base)
        self._version: int | None = None
        self._digest: str | None = None
        self._manifest: Manifest | None = None  # of the served release

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate samples, but only with weights of this run.

        A restarted process refuses requests until it has loaded a release, because it has its
        initial weights. Any error that is not an ``OffbeatError`` is a bug in the engine
        (``classify``).

        Raises:
            EngineUnavailable: The engine holds no weights of this run, or ended before the request
                did.
            InvalidRequest: The engine can never serve the request, or the request's id is open.
        """
        if self._version is None:
            problem = "it holds no weights of this run"
            raise EngineUnavailable(self._name, "generate", problem, "Sync it first")
        return await self._served.generate(request)

    def classify(self, error: Exception) -> OffbeatError:
        """Return the error to report for an error of ``generate``: the same, or a ``RemoteBug``."""
        if isinstance(error, OffbeatError):
            return error
        return RemoteBug(self._name, "generate", type(error).__name__, first_line(error))

    async def state(self, fence: Fence) -> EngineState:
        """Return the engine's state.

        Raises:
            EngineUnavailable: The process is alive, but its engine is broken.
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
            cpu_s=self._cpu_clock(),
        )

    async def served_weights(self) -> ServedWeights:
        """Return a description of the served weights for ``offbeat verify-weights``.

        The call changes nothing, so it needs no fence.
        """
        version, manifest = self._version, self._manifest
        if version is None or manifest is None:
            return ServedWeights(self._name, version)
        return await self._read_back(version, manifest)

    async def _read_back(self, version: int, manifest: Manifest) -> ServedWeights:
        """Return the served release, with digests of the tensors read back, or with a problem."""
        problem = "this kind of engine cannot read back the weights that it serves"
        return ServedWeights(self._name, version, manifest, problem=problem)

    async def load(
        self, fence: Fence, epoch: int, release: WeightRelease, *handles: Bytes | ReleaseHandle
    ) -> WeightsAck:
        """Load a release completely, or raise and keep serving the previous one.

        Args:
            fence: Fence of the caller.
            epoch: Epoch of the transfer.
            release: The release without handles. If it has a delta, only the changes are loaded. If
                it has no manifest, it stands for this process's initial weights, because an
                evaluation has no trainer. The ack then contains the digest of the model's files.
            *handles: The chunks of the release or of its delta, or one handle for the trainer ranks
                that hold the parts.

        Raises:
            BaseRefused: The engine does not serve the base of the delta. No transfer was begun, so
                the caller may send the full release.
            ReleaseLost: The ranks that hold a part have ended, or they now send a different
                release.
            WeightSyncFailed: The release did not fit, arrived damaged, or could not be fetched.
        """
        started_s, delta, version = time.perf_counter(), release.delta, release.version
        self._guard.check(fence)
        base = None if delta is None else self._kept_base.check(version, delta.base, self._digest)
        self._begin_transfer(epoch, version)
        incoming = IncomingRelease(epoch, release, handles, self._fetcher, base)
        digest = await self._hash_files(epoch, version) if incoming.is_initial else release.digest
        with self._classify_failures(epoch, version):
            outcome = await self._load_release(incoming)
            self._manifest = incoming.release.manifest
            chunks = cast("tuple[Bytes, ...]", incoming.chunks)  # in main memory if they are kept
            self._kept_base.serves(digest, release.manifest, chunks)
        return self._acknowledge(started_s, epoch, version, digest, outcome)

    async def _hash_files(self, epoch: int, version: int) -> str:
        """Return the digest of the model's files. The engine must still have their weights.

        Raises:
            WeightSyncFailed: A release has replaced the weights, or the files cannot be read.
        """
        if self._version not in (None, version):
            problem = f"a newer release replaced the loaded weights: version {self._version}"
            raise WeightSyncFailed(self._name, epoch, version, problem)
        try:
            return await in_thread("digest", lambda: digest_loaded(self._model_path))
        except OSError as error:
            raise WeightSyncFailed(self._name, epoch, version, str(error)) from error

    async def close(self) -> None:
        """Close the engine. Open calls raise ``EngineUnavailable``."""
        await self._served.close()

    def _begin_transfer(self, epoch: int, version: int) -> None:
        if epoch <= self._epoch:
            problem = f"a newer transfer was begun: epoch {self._epoch}"
            raise WeightSyncFailed(self._name, epoch, version, problem)
        self._epoch = epoch

    def _check_newest(self, epoch: int) -> None:
        """Check that no newer transfer was begun, because its weights may already be served.

        Raises:
            TransferRefused: A newer transfer was begun.
        """
        if epoch < self._epoch:
            raise TransferRefused(epoch, "epoch", str(epoch), f"the newest, {self._epoch}")

    @contextlib.contextmanager
    def _classify_failures(self, epoch: int, version: int) -> Generator[None]:
        """Convert the failures of a transfer to the controller's error classes."""
        try:
            yield
        except SenderGone as gone:
            raise ReleaseLost(self._name, version, str(gone)) from gone
        except self._transfer_failures as failure:
            raise WeightSyncFailed(self._name, epoch, version, str(failure)) from failure
        except CanaryFailed:
            self._version = self._digest = None  # the old weights are overwritten
            raise

    def _acknowledge(
        self, started_s: float, epoch: int, version: int, digest: str, outcome: LoadOutcome
    ) -> WeightsAck:
        """Start serving the loaded release and return its ack."""
        self._version, self._digest = version, digest
        return WeightsAck(
            engine=self._name,
            incarnation=self._incarnation,
            epoch=epoch,
            version=version,
            digest=digest,
            transfer_s=time.perf_counter() - started_s - outcome.pause_s,
            pause_s=outcome.pause_s,
            busy_s=self._served.busy_s,
            tokens=self._served.tokens,
            cpu_s=self._cpu_clock(),
            canary_gap=outcome.canary_gap,
        )

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        """Fetch, verify and commit a release, and check its canary if it has one.

        Each kind of engine overrides this. An initial release has no data to fetch: the engine only
        stamps tokens with its version from now on.

        Raises:
            TransferFailed: No holder of a part could send it. The engine serves the previous
                version.
            TransferRefused: The release did not fit, or arrived damaged, or the engine no longer
                has the initial weights. It serves the previous version.
            CanaryFailed: The engine does not reproduce the trainer's values. It serves nothing, and
                its requests are lost.
        """
        raise NotImplementedError
