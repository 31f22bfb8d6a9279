"""One release into a vLLM engine: wholly, or not at all, or STALE until a whole one comes.

    stage    coverage, copy into shared memory, digests     decoding goes on    failure: untouched
    pause    the scheduler stands still                                         failure: untouched
    start    the workers' own digests agree; layers open                        failure: untouched
    update   each chunk                                                         failure: STALE
    finish   layers closed, version named, and read back                        failure: STALE
    resume   decoding goes on

STALE: the layers that were open are put back, the engine lives and stays paused, its weights are a
mixture of no version. A worker that cannot even do that takes the engine with it.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from offbeat.actors.call import first_line
from offbeat.actors.generators.vllm.coverage import Coverage
from offbeat.actors.generators.vllm.engine import VllmEngine
from offbeat.actors.generators.vllm.lazy_import import Library
from offbeat.actors.generators.vllm.outputs import NO_VERSION, label_of
from offbeat.actors.generators.vllm.staging import StagingArea, room_for
from offbeat.actors.generators.vllm.workarounds import PAUSE_SLEEP
from offbeat.config.rollouts import VllmConfig
from offbeat.messages.failures import DeadlineExceeded, EngineUnavailable, OffbeatError
from offbeat.weight_sync.chunks import walk
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Manifest, release_digest

T = TypeVar("T")
Chunk = NDArray[np.uint8]
Placed = list[tuple[int, int, str]]
log = structlog.stdlib.get_logger()

_CALLS: Final = "a call of the weight sync"


class CallRefused(OffbeatError):
    """vLLM raised in a call of a weight sync."""

    def __init__(self, call: str, detail: str) -> None:
        super().__init__(call, detail)
        self.call, self.detail = call, detail

    def __str__(self) -> str:
        return f"vLLM refused {self.call}: {self.detail}"


class WeightUpdates:
    """Takes releases into one engine, one after the other."""

    def __init__(
        self,
        engine: VllmEngine,
        library: Library,
        coverage: Coverage,
        config: VllmConfig,
        area: StagingArea,
        *,
        vllm_version: str,
    ) -> None:
        self._engine, self._vllm, self._llm = engine, library, engine.llm
        self.coverage, self._config = coverage, config
        self._sleepless = PAUSE_SLEEP.applies_to(vllm_version)
        self.area = area
        self._one_at_a_time = asyncio.Lock()
        self._newest = -1

    async def take(
        self, epoch: int, version: int, digest: str, manifest: Manifest, chunks: Sequence[Chunk]
    ) -> float:
        """Serve a release. How long decoding stood still, in seconds.

        Raises:
            TransferRefused: It does not fit, did not arrive as it was sent, or is overtaken.
            DeadlineExceeded: A call took longer than ``call_deadline_s``.
            CallRefused: vLLM raised.
            EngineUnavailable: The engine's processes are gone.
        """
        self._newest = max(self._newest, epoch)
        async with self._one_at_a_time:
            if epoch < self._newest:
                raise TransferRefused(epoch, "epoch", str(epoch), f"the newest, {self._newest}")
            self._engine.check_usable("take weights")
            placed = await self._stage(epoch, digest, manifest, chunks)
            return await self._swap(epoch, version, manifest, placed)

    async def idle(self) -> None:
        """Return once no release is being taken."""
        async with self._one_at_a_time:
            pass

    def close(self) -> None:
        self.area.close()

    # --- before the pause -------------------------------------------------------------------------

    async def _stage(
        self, epoch: int, digest: str, manifest: Manifest, chunks: Sequence[Chunk]
    ) -> Placed:
        self.coverage.check(epoch, manifest)  # work-around: silent_coverage
        _check_sizes(epoch, manifest, chunks)
        grown = self.area.reserve(room_for(manifest.chunk_nbytes))
        placed = await self._filled(chunks)
        got = release_digest(manifest, [digest for _, _, digest in placed])
        if got != digest:
            raise TransferRefused(epoch, "digest", got, digest)
        if grown:
            where = {"path": self.area.path, "nbytes": self.area.nbytes}
            request = self._vllm.WeightTransferInitRequest(where)
            await self._call("init", self._llm.init_weight_transfer_engine(request))
        await self._call("stage", self._llm.collective_rpc("ws_stage", args=(epoch, placed)))
        return placed

    async def _filled(self, chunks: Sequence[Chunk]) -> Placed:
        filling = asyncio.ensure_future(asyncio.to_thread(self.area.fill, chunks))
        try:
            return await asyncio.shield(filling)
        except asyncio.CancelledError:
            await asyncio.wait((filling,))  # nobody else may write there meanwhile
            raise

    # --- the swap ---------------------------------------------------------------------------------

    async def _swap(self, epoch: int, version: int, manifest: Manifest, placed: Placed) -> float:
        pause, started_s = self._config.pause, time.perf_counter()
        self._engine.close_gate(start_anew=pause == "abort")
        touched = False
        try:
            await self._pause()
            if pause == "wait":
                started_s = time.perf_counter()  # until here it decoded
            try:
                await self._call("start", self._llm.start_weight_update())
            except CallRefused:
                raise  # the workers' digests differ: no layer was opened
            except BaseException:
                touched = True  # nobody knows
                raise
            touched = True
            await self._load(epoch, version, manifest, placed)
            self._engine.serve(version, epoch)
            await self._call("resume", self._llm.resume_generation())
        except BaseException as failure:
            await self._undo(str(failure) or type(failure).__name__, touched=touched)
            raise
        self._engine.open_gate()
        return time.perf_counter() - started_s

    async def _pause(self) -> None:
        mode, clear = self._config.pause, self._config.kv == "recompute"
        if self._sleepless:  # work-around: pause_sleep
            pausing = self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear)
        else:
            pausing = self._llm.pause_generation(mode=mode, clear_cache=clear)
        if mode == "wait":  # as long as the longest sample takes: the caller's deadline bounds it
            await pausing
        else:
            await self._call("pause", pausing)

    async def _load(self, epoch: int, version: int, manifest: Manifest, placed: Placed) -> None:
        for chunk in walk(manifest):
            info = {
                "epoch": epoch,
                "index": chunk.index,
                "offset": placed[chunk.index][0],
                "tensors": [
                    (spec.name, list(spec.shape), spec.dtype, spec.offset, spec.nbytes)
                    for spec in chunk.specs
                ],
            }
            request = self._vllm.WeightTransferUpdateRequest(info)
            await self._call(
                f"chunk {chunk.index} ({chunk.tensors})", self._llm.update_weights(request)
            )
        label = label_of(version)
        await self._call("finish", self._llm.finish_weight_update(weight_version=label))
        held = await self._call("version", self._llm.get_weight_version())
        if held != label:
            raise TransferRefused(epoch, "version after the update", held, label)

    async def _undo(self, problem: str, *, touched: bool) -> None:
        """Back to the old weights if nothing was touched, else STALE; the engine lives, if it can."""
        engine = self._engine
        try:
            if touched:
                opened = await self._call("abort", self._llm.collective_rpc("ws_abort"))
                await self._call("unname", self._llm.update_weight_version(NO_VERSION))
                log.warning("engine.stale", engine=engine.name, layers=opened, problem=problem)
                await engine.lose(f"a weight sync failed half-way ({problem})")
            elif engine.serving:
                await self._call("resume", self._llm.resume_generation())
        except (OffbeatError, self._vllm.EngineDeadError) as failure:
            engine.give_up(
                f"after a failed weight sync ({problem}) it could not be saved: {failure}"
            )
            await engine.lose("a weight sync failed half-way")
        engine.open_gate()

    async def _call(self, what: str, reply: Awaitable[T]) -> T:
        deadline_s = self._config.call_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await reply
        except TimeoutError:
            raise DeadlineExceeded(_CALLS, f"{what} of {self._engine.name}", deadline_s) from None
        except self._vllm.EngineDeadError as dead:
            problem, fix = "the engine core has died", "Start another engine"
            raise EngineUnavailable(self._engine.name, what, problem, fix) from dead
        except OffbeatError:
            raise
        except Exception as error:  # a worker's error arrives as text in a plain Exception
            raise CallRefused(what, first_line(error)) from error


def _check_sizes(epoch: int, manifest: Manifest, chunks: Sequence[Any]) -> None:
    got, want = [chunk.nbytes for chunk in chunks], list(manifest.chunk_nbytes)
    for index, (size, expected) in enumerate(zip(got, want, strict=False)):
        if size != expected:
            raise TransferRefused(epoch, f"size of chunk {index}", str(size), str(expected))
    if len(got) != len(want):
        raise TransferRefused(epoch, "chunks received", str(len(got)), str(len(want)))
