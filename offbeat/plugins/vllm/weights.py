"""Loads a release into a vLLM engine: completely, or not at all, or the engine becomes STALE.

    stage    coverage, copy into shared memory, digests     decoding goes on    failure: untouched
       or    coverage, each worker fetches what it loads    decoding goes on    failure: untouched
    then concurrently with decoding, if the workers can:
    prepare  start, update by each chunk                    decoding goes on    failure: untouched
    pause    the scheduler is paused                                            failure: untouched
    finish   the new layers replace the old ones                                failure: STALE
    else in place:
    pause    the scheduler is paused                                            failure: untouched
    start    layers open                                                        failure: STALE
    update   each chunk                                                         failure: STALE
    finish   layers closed                                                      failure: STALE
    and at last:
    name     version named, and read back                                       failure: STALE
    resume   decoding goes on, nothing is answered yet                          failure: STALE
    canary   it computes what the trainer computes                              failure: STALE

STALE: open layers get their previous tensors back. The engine lives and stays paused. Its weights
are a mixture of no version. If a worker fails even at that, the engine is lost.
"""

import asyncio
import contextlib
import enum
import time
from collections.abc import Awaitable, Sequence

import msgspec
import structlog

from offbeat.messages.failures import OffbeatError
from offbeat.messages.weights import Canary, WeightRelease
from offbeat.plugins.vllm.calls import CallRefused, Calls
from offbeat.plugins.vllm.coverage import Coverage
from offbeat.plugins.vllm.engine import VllmEngine
from offbeat.plugins.vllm.lazy_import import Library
from offbeat.plugins.vllm.load_comparison import (
    LoadedRelease,
    NotCompared,
    first_difference,
    place_tensors,
)
from offbeat.plugins.vllm.outputs import NO_VERSION, make_label
from offbeat.plugins.vllm.section import VllmConfig
from offbeat.plugins.vllm.staging import StagingArea, check_sizes, room_for
from offbeat.plugins.vllm.verdicts import PREPARED, VERIFIED, Verdicts
from offbeat.plugins.vllm.workarounds import PAUSE_SLEEP
from offbeat.weight_sync.canary import CanaryChecks
from offbeat.weight_sync.chunks import WeightChunk, walk
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest, release_digest
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.region_tensors import group_tensors
from offbeat.weight_sync.served import TensorDifference
from offbeat.weight_sync.transport import ReleaseHandle

log = structlog.stdlib.get_logger()


class _Reached(enum.IntEnum):
    """Progress of an update, which determines how to undo it."""

    STAGED = 0  # nothing is open
    OPEN = 1  # the workers have begun, the served model is untouched
    PAUSED = 2
    TOUCHED = 3  # the model was touched, or may have been


class WeightUpdates:
    """Loads releases into one engine, one after the other."""

    def __init__(
        self,
        engine: VllmEngine,
        library: Library,
        coverage: Coverage,
        config: VllmConfig,
        area: StagingArea,
        *,
        vllm_version: str,
        loads_files: bool = True,
    ) -> None:
        """``loads_files``: whether the engine started with the weights of its model's files."""
        self._engine, self._vllm, self._llm = engine, library, engine.llm
        self.coverage, self._config = coverage, config
        self._call = Calls(engine, config.call_deadline_s)
        self._canaries = CanaryChecks(engine.name)
        self._sleepless = PAUSE_SLEEP.applies_to(vllm_version)
        self.area, self._verdicts = area, Verdicts()
        self.layout = RecordedLayout(engine, coverage, self._call)
        self.in_place = False
        """Whether updates never prepare during decoding. Set it before the first release."""
        self._workers, self._beside = 0, False
        self._planned: Manifest | None = None  # manifest that the workers know
        self._chunks: list[WeightChunk] = []  # one per load call of the workers
        self._staged: LoadedRelease | None = None
        self._loaded: LoadedRelease | None = None  # last release that was loaded completely
        self._reached = _Reached.STAGED
        self._one_at_a_time = asyncio.Lock()
        self._newest = -1
        self._loads_files = loads_files

    async def load(
        self, epoch: int, release: WeightRelease, content: Sequence[Bytes] | ReleaseHandle
    ) -> tuple[float, float | None]:
        """Load, verify and serve a release.

        Args:
            epoch: Epoch of the transfer.
            release: The release. If the workers fetch it, it may be loaded by its delta.
            content: Its chunks, or the trainer ranks that hold them. From the ranks, every worker
                fetches the parts that it loads, and the layout has been recorded before.

        Returns:
            Seconds that decoding was paused, and distance from the release's canary in nats, or
            None without a canary.

        Raises:
            TransferRefused: It does not fit the model, arrived damaged, or is older than another
                release.
            TransferFailed: No trainer rank that holds a part could send it.
            SenderGone: All ranks that hold a part have ended, or send a different release.
            DeadlineExceeded: A call took longer than ``call_deadline_s``.
            CallRefused: vLLM raised.
            EngineUnavailable: The engine's processes have ended.
            CanaryFailed: Engine and trainer compute different log-probabilities from these weights.
        """
        self._newest = max(self._newest, epoch)
        async with self._one_at_a_time:
            if epoch < self._newest:
                raise TransferRefused(epoch, "epoch", str(epoch), f"the newest, {self._newest}")
            self._engine.check_usable("take weights")
            if isinstance(content, ReleaseHandle):
                await self._fetch(epoch, release, content)
            else:
                await self._stage(epoch, release, content)
            return await self._update(epoch, release.version, release.manifest.canary)

    async def name_loaded(self, epoch: int, version: int) -> None:
        """Serve the weights that vLLM has loaded itself, under this version.

        Raises:
            TransferRefused: A release was begun, so the loaded weights may be gone. Or the engine
                waits for a quantized release, and has loaded none.
            DeadlineExceeded: A call took longer than ``call_deadline_s``.
            CallRefused: vLLM raised.
            EngineUnavailable: The engine's processes have ended.
        """
        async with self._one_at_a_time:
            if self._newest >= 0:
                raise TransferRefused(epoch, "weights", "those of a release", "as loaded")
            if not self._loads_files:
                raise TransferRefused(
                    epoch, "weights", "invented: sync.quantize is set", "as loaded"
                )
            self._engine.check_usable("serve loaded weights")
            label = make_label(version)
            await self._call("name", self._llm.update_weight_version(label))
            await self._check_named(epoch, label)
            self._engine.serve(version, epoch)

    async def first_difference(self) -> TensorDifference | None:
        """Compare the served release with the workers' weights, through their recorded loader.

        Raises:
            OffbeatError: As ``load_comparison.first_difference``.
        """
        async with self._one_at_a_time:
            if self._loaded is None:
                raise NotCompared("it has loaded no release")
            return await first_difference(self._llm, self._call, self._loaded)

    async def idle(self) -> None:
        """Wait until no release is being loaded."""
        async with self._one_at_a_time:
            pass

    def close(self) -> None:
        self.area.close()
        self._verdicts.close()

    # --- staging ----------------------------------------------------------------------------------

    async def _stage(self, epoch: int, release: WeightRelease, chunks: Sequence[Bytes]) -> None:
        """Make the workers map the release and verify its digests.

        Only the workers hash its content, as they read it. This process only compares the chunk
        digests with the release's digest.
        """
        manifest: Manifest = release.manifest
        known = self._check_release(epoch, release)
        check_sizes(epoch, manifest, chunks)
        grown = self.area.reserve(room_for(manifest.chunk_nbytes))
        offsets = await self._fill(chunks)
        if grown or not known:
            await self._introduce(manifest, offsets)
        self._staged = LoadedRelease(epoch, manifest, self._chunks, offsets)
        staged = list(zip(offsets, manifest.chunk_nbytes, manifest.chunk_digests, strict=True))
        await self._call("stage", self._llm.collective_rpc("ws_stage", args=(epoch, staged)))
        await self._call("verify", self._verdicts.of(epoch, VERIFIED, self._workers))

    def _check_release(self, epoch: int, release: WeightRelease) -> bool:
        """Check coverage and digest of a release; return whether the workers know its layout."""
        manifest: Manifest = release.manifest
        known = self._planned is not None and self._planned.describes_as(manifest)
        if not known:
            self.coverage.check(epoch, manifest)  # work-around: silent_coverage
        got = release_digest(manifest, manifest.chunk_digests)
        if got != release.digest:
            raise TransferRefused(epoch, "digest", got, release.digest)
        return known

    async def _fetch(self, epoch: int, release: WeightRelease, route: ReleaseHandle) -> None:
        """Make every worker fetch and verify the buckets that hold a part of its weights.

        Each fetch limits the time per bucket. The caller limits the total time.
        """
        manifest: Manifest = release.manifest
        if not self._check_release(epoch, release):
            await self._introduce_fetch(manifest, route)
        self._staged = LoadedRelease(epoch, manifest, self._chunks, None)
        senders, delta = route.encode_senders(), release.delta
        changes = b"" if delta is None else msgspec.msgpack.encode((delta.base, delta.manifest))
        args = epoch, len(self._chunks), list(manifest.chunk_digests), senders, changes
        try:
            await self._call("fetch", self._llm.collective_rpc("ws_fetch", args=args))
            verdict = self._verdicts.of(epoch, VERIFIED, self._workers)
            await self._call.however_long("fetch", verdict)
        except BaseException:
            with contextlib.suppress(OffbeatError):  # the fetch failure is more useful
                await self._call("abort", self._llm.collective_rpc("ws_abort"))
            raise

    async def _introduce_fetch(self, manifest: Manifest, route: ReleaseHandle) -> None:
        """Send the workers the layout of releases, and make them select the buckets they need."""
        self._planned = None
        self.area.reserve(1)  # empty memory cannot be mapped
        await self._connect()
        unsealed = msgspec.structs.replace(manifest, chunk_digests=(), canary=None)
        routes = route.transport, route.buckets
        layout, routes = map(msgspec.msgpack.encode, (unsealed, routes))
        self._chunks = list(walk(group_tensors(manifest)))
        args = self._engine.name, layout, routes, self.in_place
        await self._learn_layout(manifest, self._llm.collective_rpc("ws_plan_fetch", args=args))

    async def _fill(self, chunks: Sequence[Bytes]) -> list[int]:
        filling = asyncio.ensure_future(asyncio.to_thread(self.area.fill, chunks))
        try:
            return await asyncio.shield(filling)
        except asyncio.CancelledError:
            await asyncio.wait((filling,))  # no other release may write there meanwhile
            raise

    async def _introduce(self, manifest: Manifest, offsets: Sequence[int]) -> None:
        """Send the workers the location and layout of the memory, and let them plan loading."""
        self._planned = None
        await self._connect()
        self._chunks = list(walk(manifest))
        tensors = [
            place_tensors(each, start) for start, each in zip(offsets, self._chunks, strict=True)
        ]
        plans = self._llm.collective_rpc("ws_plan", args=(tensors, self.in_place))
        await self._learn_layout(manifest, plans)

    async def _connect(self) -> None:
        """Make the workers map the shared memory and open the pipe for their reports."""
        area = self.area
        where = {"path": area.path, "nbytes": area.nbytes, "verdicts": self._verdicts.path}
        request = self._vllm.WeightTransferInitRequest(where)
        await self._call("init", self._llm.init_weight_transfer_engine(request))

    async def _learn_layout(self, manifest: Manifest, plans: Awaitable[list[str]]) -> None:
        """Wait until the workers know a layout. Store whether they load it during decoding."""
        obstacles = await self._call("plan", plans)
        self._workers, self._beside = len(obstacles), not any(obstacles)
        self._planned = manifest
        if not self._beside:
            log.info("engine.updates_in_place", engine=self._engine.name, because=obstacles)

    # --- the update -------------------------------------------------------------------------------

    async def _update(
        self, epoch: int, version: int, canary: Canary | None
    ) -> tuple[float, float | None]:
        self._reached = _Reached.STAGED
        try:
            if self._beside:
                await self._prepare(epoch)
            pause_s = await self._swap(epoch, version)
            canary_gap = None if canary is None else await self._check(canary, epoch, version)
        except BaseException as failure:
            await self._undo(str(failure) or type(failure).__name__)
            if isinstance(failure, Exception):
                self._engine.check_not_gone("take weights")
            raise
        self._engine.open_gate()
        self._loaded = self._staged
        return pause_s, canary_gap

    async def _check(self, canary: Canary, epoch: int, version: int) -> float:
        """Check the engine against the canary, while new requests and finished samples wait."""
        answers = await self._call("canary", self._engine.greedy(canary.prompts))
        return self._canaries.check(canary, answers, epoch=epoch, version=version)

    async def _prepare(self, epoch: int) -> None:
        self._reached = _Reached.OPEN
        await self._call("start", self._llm.start_weight_update())
        await self._hand_over(epoch)
        await self._call("prepare", self._verdicts.of(epoch, PREPARED, self._workers))

    async def _swap(self, epoch: int, version: int) -> float:
        """Swap the weights while decoding is paused; return the seconds of the pause."""
        pause, started_s = self._config.pause, time.perf_counter()
        self._reached = max(self._reached, _Reached.PAUSED)
        self._engine.close_gate(start_anew=pause == "abort")
        await self._pause()
        if pause == "wait":
            started_s = time.perf_counter()  # until here it decoded
        self._reached = _Reached.TOUCHED
        if not self._beside:
            await self._call("start", self._llm.start_weight_update())
            await self._hand_over(epoch)
        await self._finish(epoch, version)
        self._engine.serve(version, epoch)
        await self._call("resume", self._llm.resume_generation())
        return time.perf_counter() - started_s

    async def _pause(self) -> None:
        mode, clear = self._config.pause, self._config.kv == "recompute"
        if self._sleepless:  # work-around: pause_sleep
            pausing = self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear)
        else:
            pausing = self._llm.pause_generation(mode=mode, clear_cache=clear)
        if mode == "wait":
            await self._call.however_long("pause", pausing)
        else:
            await self._call("pause", pausing)

    async def _hand_over(self, epoch: int) -> None:
        for chunk in self._chunks:
            info = {"epoch": epoch, "index": chunk.index}
            request = self._vllm.WeightTransferUpdateRequest(info)
            what = f"chunk {chunk.index} ({chunk.tensors})"
            await self._call(what, self._llm.update_weights(request))

    async def _finish(self, epoch: int, version: int) -> None:
        label = make_label(version)
        await self._call("finish", self._llm.finish_weight_update(weight_version=label))
        await self._check_named(epoch, label)

    async def _check_named(self, epoch: int, label: str) -> None:
        served = await self._call("version", self._llm.get_weight_version())
        if served != label:
            raise TransferRefused(epoch, "version after the update", served, label)

    async def _undo(self, problem: str) -> None:
        """Restore the old weights if nothing was touched, else become STALE.

        Keep the engine if possible.
        """
        engine, reached = self._engine, self._reached
        try:
            opened = await self._call("abort", self._llm.collective_rpc("ws_abort"))
            if reached is _Reached.TOUCHED:
                await self._call("unname", self._llm.update_weight_version(NO_VERSION))
                log.warning("engine.stale", engine=engine.name, layers=opened, problem=problem)
                await engine.lose(f"a weight sync failed half-way ({problem})")
            elif reached is _Reached.PAUSED and engine.serving:
                await self._call("resume", self._llm.resume_generation())
        except (OffbeatError, self._vllm.EngineDeadError) as failure:
            engine.give_up(
                f"after a failed weight sync ({problem}) it could not be saved: {failure}"
            )
            await engine.lose("a weight sync failed half-way")
        engine.open_gate()


class RecordedLayout:
    """Regions of a model's files that the loaders of an engine's workers read."""

    def __init__(self, engine: VllmEngine, coverage: Coverage, call: Calls) -> None:
        self._engine, self._coverage, self._call = engine, coverage, call
        self._layout: EngineLayout | None = None
        self.problem = ""
        """Why the layout is missing; empty before the recording."""
        self._one_at_a_time = asyncio.Lock()

    async def get(self) -> EngineLayout | None:
        """Return the regions that each worker needs, or None (see ``problem``).

        Raises:
            DeadlineExceeded: The workers did not answer in time. The next call asks them again.
            EngineUnavailable: The engine's processes have ended.
        """
        async with self._one_at_a_time:
            if self._layout is None and not self.problem:
                await self._record()
        return self._layout

    def give_up(self, problem: str) -> None:
        """Discard the layout for good because of ``problem``."""
        self._layout, self.problem = None, problem

    async def _record(self) -> None:
        tensors = [(n, list(shape), dtype) for n, (shape, dtype) in self._coverage.tensors.items()]
        asked = self._engine.llm.collective_rpc("ws_record", args=(tensors,))
        try:
            answers = await self._call("record", asked)
        except CallRefused as refused:
            self.give_up(str(refused))
            return
        refusals = [each for each in answers if isinstance(each, str)]
        if refusals:
            self.give_up(refusals[0])
            return
        ranks = tuple(
            tuple((name, Region(tuple(start), tuple(stop))) for name, start, stop in regions)
            for regions in answers
        )
        self._layout = EngineLayout(tuple(self._coverage.tensors), ranks)
        count = sum(map(len, ranks))
        log.info(
            "weights.layout_recorded", engine=self._engine.name, regions=count, ranks=len(ranks)
        )
