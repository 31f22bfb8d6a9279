"""Engine without a model: random tokens after a random wait.

Legend: G samples of a request.
"""

import asyncio
import math
import random
import string
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from offbeat.config.sections.generator import StubConfig
from offbeat.generators.stop_strings import StopMatcher
from offbeat.messages.failures import EngineUnavailable, InvalidRequest
from offbeat.messages.generation import STOPPED_AT_STRING, GenerateRequest, GenerateResult
from offbeat.messages.groups import VersionSpans

_VOCABULARY: Final = string.ascii_letters + string.digits + " \n"


def stub_text(token_ids: Sequence[int]) -> str:
    """Return the text of a stub's tokens, with one character for each of its 64 tokens."""
    return "".join(_VOCABULARY[token] for token in token_ids)


@dataclass(slots=True, eq=False)
class _Rollout:
    """State of one open request."""

    timer: asyncio.Task[None]
    versions: list[int]  # every version served while it was open


class StubEngine:
    """Stand-in for a model: random tokens after a random latency; no torch, no thread.

    A request has a log-normal duration. Its duration and its tokens depend only on (seed, request
    id, sampling seed). All methods belong to one event loop.
    """

    def __init__(
        self,
        config: StubConfig,
        *,
        name: str,
        incarnation: str,
        seed: int,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.version = 0
        self.tokens = 0
        """Tokens generated since start."""
        self.busy_s = 0.0
        """Modelled seconds of the ended requests, as if they ran one at a time."""
        self._config, self._seed, self._sleep = config, seed, sleep
        self._open: dict[str, _Rollout] = {}
        self._closed = False

    @property
    def running(self) -> int:
        """Number of open requests."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        return 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return random samples, after the modelled latency."""
        self.check_usable("generate")
        id_ = request.request_id
        if "" in request.sampling.stop:
            raise InvalidRequest(id_, "stop holds an empty string", "Leave it out")
        if id_ in self._open:
            raise InvalidRequest(id_, "a request of this id is open", "Use each id once")
        rng = random.Random(f"{self._seed}/{id_}/{request.sampling.seed}")
        duration_s = self._duration_s(rng)
        timer = asyncio.create_task(self._sleep(duration_s), name=f"stub rollout {id_}")
        rollout = self._open[id_] = _Rollout(timer, [self.version])
        try:
            await asyncio.wait((timer,))
        finally:
            timer.cancel()
            del self._open[id_]
        self.check_usable("generate")
        self.busy_s += duration_s
        return self._result(request, rollout, rng)

    async def set_version(self, version: int) -> None:
        """Wait for the modelled time of a weight sync. Open requests end with the new version."""
        self.check_usable("set version")
        await self._sleep(self._config.sync_s)
        self.version = version
        for rollout in self._open.values():
            rollout.versions.append(version)

    async def close(self) -> None:
        """Close the engine, so that open calls raise ``EngineUnavailable``."""
        self._closed = True
        for rollout in self._open.values():
            rollout.timer.cancel()

    def _duration_s(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self._config.median_rollout_s), self._config.tail_sigma)

    def _result(
        self, request: GenerateRequest, rollout: _Rollout, rng: random.Random
    ) -> GenerateResult:
        most = request.sampling.max_new_tokens
        drawn = [rng.randint(1, most) for _ in range(request.samples)]
        noise = np.random.default_rng(rng.getrandbits(64))
        token_ids = noise.integers(0, len(_VOCABULARY), sum(drawn), dtype=np.int32)
        logprobs = -noise.exponential(1.0, sum(drawn)).astype(np.float32) - np.float32(1e-3)
        ends = [
            _find_end(ids.tolist(), most, request.sampling.stop)
            for ids in np.split(token_ids, np.cumsum(drawn[:-1]))
        ]
        lengths = [length for length, _ in ends]
        kept = np.concatenate(
            [np.arange(count) < length for count, length in zip(drawn, lengths, strict=True)]
        )
        offsets = np.zeros(request.samples + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        self.tokens += int(offsets[-1])
        return GenerateResult(
            request_id=request.request_id,
            token_ids=token_ids[kept],
            logprobs=logprobs[kept],
            offsets=offsets,
            finish_reasons=tuple(reason for _, reason in ends),
            version_spans=tuple(even_spans(rollout.versions, length) for length in lengths),
            engine=self.name,
            incarnation=self.incarnation,
        )

    def check_usable(self, during: str) -> None:
        if self._closed:
            raise EngineUnavailable(self.name, during, "it was closed", "Start another engine")


def _find_end(token_ids: Sequence[int], most: int, stop: Sequence[str]) -> tuple[int, str]:
    """Return where a sample with these drawn tokens ends, and why."""
    if stop:
        matcher = StopMatcher(stub_text, stop)
        for length, token in enumerate(token_ids, 1):
            if matcher.push(token):
                return length, STOPPED_AT_STRING
    return len(token_ids), "length" if len(token_ids) == most else "stop"


def even_spans(versions: list[int], tokens: int) -> VersionSpans:
    """Spread the tokens evenly over the versions, in order. If too few, use the newest versions."""
    versions = versions[-tokens:]
    bounds = [round(at * tokens / len(versions)) for at in range(len(versions))] + [tokens]
    return tuple(
        (version, end - start)
        for version, start, end in zip(versions, bounds, bounds[1:], strict=False)
    )
