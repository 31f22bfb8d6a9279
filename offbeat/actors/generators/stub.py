"""An engine that only takes time: random tokens after a random wait.

Legend: G samples of a request.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from offbeat.actors.generators.errors import EngineUnavailable, InvalidRequest
from offbeat.config.run import StubConfig
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import VersionSpans


@dataclass(slots=True, eq=False)
class _Rollout:
    """One open request."""

    versions: list[int]  # in place at some time while it was open
    aborted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class StubEngine:
    """The async surface of ``EngineLoop`` over a latency model; no torch, no thread.

    A request takes a log-normal time. Its time and its tokens depend on (seed, request id,
    sampling seed) alone. All methods belong to one event loop.
    """

    def __init__(
        self,
        config: StubConfig,
        *,
        name: str,
        incarnation: str,
        seed: int,
        vocabulary: int = 64,
        version: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.version = version
        self.tokens = 0
        """Generated since start."""
        self.busy_s = 0.0
        """Time modelled for the requests that ended, one at a time."""
        self._config, self._seed, self._vocabulary, self._sleep = config, seed, vocabulary, sleep
        self._open: dict[str, _Rollout] = {}
        self._may_finish = asyncio.Event()
        self._may_finish.set()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._closed = False

    @property
    def running(self) -> int:
        """Requests whose time is not up."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        return 0

    @property
    def paused(self) -> bool:
        return not self._may_finish.is_set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Random samples, once the time is up and the engine is not paused."""
        self.check_usable("generate")
        id_ = request.request_id
        if id_ in self._open:
            raise InvalidRequest(id_, "a request of this id is open", "Use each id once")
        dice = random.Random(f"{self._seed}/{id_}/{request.sampling.seed}")
        rollout = self._open[id_] = _Rollout([self.version])
        self._all_ended.clear()
        duration_s = self._duration_s(dice)
        try:
            aborted = await self._time_passes(duration_s, rollout, id_)
        finally:
            del self._open[id_]
            if not self._open:
                self._all_ended.set()
        self.check_usable("generate")
        self.busy_s += duration_s
        return self._result(request, rollout, dice, aborted=aborted)

    async def abort(self, request_ids: Collection[str] | None) -> int:
        """End these requests, or all: their callers get partial samples. How many were ended."""
        self.check_usable("abort")
        wanted = self._open.keys() if request_ids is None else self._open.keys() & set(request_ids)
        for id_ in wanted:
            self._end(self._open[id_])
        return len(wanted)

    async def pause(self) -> None:
        """No request finishes until ``resume``."""
        self.check_usable("pause")
        self._may_finish.clear()

    async def resume(self) -> None:
        """Requests whose time is up finish."""
        self.check_usable("resume")
        self._may_finish.set()

    async def drain(self) -> None:
        """Return once no request is open."""
        self.check_usable("drain")
        if self.paused and self._open:
            raise EngineUnavailable(
                self.name, "drain", "it is paused, so nothing would end", "Resume it first"
            )
        await self._all_ended.wait()

    async def set_version(self, version: int) -> None:
        """Take the modelled time of a weight sync; open requests end in the new version."""
        self.check_usable("set version")
        await self._sleep(self._config.sync_s)
        self.version = version
        for rollout in self._open.values():
            rollout.versions.append(version)

    async def close(self) -> None:
        """Open calls raise ``EngineUnavailable``."""
        self._closed = True
        for rollout in self._open.values():
            self._end(rollout)

    async def _time_passes(self, duration_s: float, rollout: _Rollout, id_: str) -> bool:
        """True if the rollout was aborted before its time was up."""
        timer = asyncio.create_task(self._time_is_up(duration_s), name=f"stub rollout {id_}")
        try:
            await asyncio.wait((timer, rollout.aborted), return_when=asyncio.FIRST_COMPLETED)
            if not rollout.aborted.done():
                await timer
        finally:
            timer.cancel()
        return rollout.aborted.done()

    async def _time_is_up(self, duration_s: float) -> None:
        await self._sleep(duration_s)
        await self._may_finish.wait()

    def _duration_s(self, dice: random.Random) -> float:
        return dice.lognormvariate(math.log(self._config.median_rollout_s), self._config.tail_sigma)

    def _result(
        self, request: GenerateRequest, rollout: _Rollout, dice: random.Random, *, aborted: bool
    ) -> GenerateResult:
        most = request.sampling.max_new_tokens
        lengths = [dice.randint(1, most) for _ in range(request.samples)]
        if aborted:
            lengths = [dice.randint(0, length) for length in lengths]
        offsets = np.zeros(request.samples + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        noise = np.random.default_rng(dice.getrandbits(64))
        total = int(offsets[-1])
        self.tokens += total
        return GenerateResult(
            request_id=request.request_id,
            token_ids=noise.integers(0, self._vocabulary, total, dtype=np.int32),
            logprobs=-noise.exponential(1.0, total).astype(np.float32) - np.float32(1e-3),
            offsets=offsets,
            finish_reasons=tuple(_reason(length, most, aborted) for length in lengths),
            version_spans=tuple(_even_spans(rollout.versions, length) for length in lengths),
            engine=self.name,
            incarnation=self.incarnation,
        )

    def _end(self, rollout: _Rollout) -> None:
        if not rollout.aborted.done():
            rollout.aborted.set_result(None)

    def check_usable(self, during: str) -> None:
        if self._closed:
            raise EngineUnavailable(self.name, during, "it was closed", "Start another engine")


def _reason(length: int, most: int, aborted: bool) -> str:  # noqa: FBT001
    if aborted:
        return "abort"
    return "length" if length == most else "stop"


def _even_spans(versions: list[int], tokens: int) -> VersionSpans:
    """The tokens spread evenly over the versions, in order; the newest ones if they are too few."""
    versions = versions[-tokens:] if tokens else []
    bounds = [round(at * tokens / len(versions)) for at in range(len(versions))] + [tokens]
    return tuple(
        (version, end - start)
        for version, start, end in zip(versions, bounds, bounds[1:], strict=False)
    )
