"""The latency model keeps the promises of a real engine."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from offbeat.config.sections.generator import StubConfig
from offbeat.fakes.engine import StubEngine
from offbeat.messages.failures import EngineUnavailable, InvalidRequest
from tests.support.generator_fixtures import MakeRequest, RunAsync

pytestmark = pytest.mark.real_clock


class HeldTime:
    """A ``sleep`` that lasts until released."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self._waiting: list[asyncio.Future[None]] = []

    async def sleep(self, duration_s: float) -> None:
        self.asked_s.append(duration_s)
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    def pass_(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()


async def no_time(_: float) -> None:
    return


def stub(
    sleep: Callable[[float], Coroutine[Any, Any, None]] = no_time, seed: int = 0, **config: float
) -> StubEngine:
    return StubEngine(
        StubConfig(**config), name="stub-0", incarnation="first", seed=seed, sleep=sleep
    )


async def settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_rollout_has_plausible_samples(request_of: MakeRequest, run_async: RunAsync) -> None:
    result = run_async(stub().generate(request_of("r", samples=8, max_new_tokens=20)))
    assert len(result.offsets) == 9
    lengths = np.diff(result.offsets)
    assert ((lengths >= 1) & (lengths <= 20)).all()
    assert (result.logprobs < 0).all()
    assert ((result.token_ids >= 0) & (result.token_ids < 64)).all()
    for length, reason, spans in zip(
        lengths, result.finish_reasons, result.version_spans, strict=True
    ):
        assert reason == ("length" if length == 20 else "stop")
        assert spans == ((0, length),)


def test_a_rollout_depends_on_seeds_and_id_alone(
    request_of: MakeRequest, run_async: RunAsync
) -> None:
    def tokens(
        engine: StubEngine, *before: str, id_: str = "r", seed: int | None = None
    ) -> list[int]:
        async def main() -> Any:
            for other in before:
                await engine.generate(request_of(other))
            return (await engine.generate(request_of(id_, samples=4, seed=seed))).token_ids.tolist()

        return run_async(main())

    assert tokens(stub()) == tokens(stub(), "x", "y")
    assert tokens(stub()) != tokens(stub(seed=1))
    assert tokens(stub()) != tokens(stub(), id_="q")
    assert tokens(stub()) != tokens(stub(), seed=5)


def test_times_are_log_normal_around_the_median(
    request_of: MakeRequest, run_async: RunAsync
) -> None:
    time = HeldTime()
    engine = stub(time.sleep, median_rollout_s=2.0, tail_sigma=0.5)

    async def main() -> None:
        calls = [asyncio.create_task(engine.generate(request_of(str(n)))) for n in range(500)]
        await settle()
        time.pass_()
        await asyncio.gather(*calls)

    run_async(main())
    logs = np.log(time.asked_s)
    assert np.median(time.asked_s) == pytest.approx(2.0, rel=0.1)
    assert logs.std() == pytest.approx(0.5, rel=0.1)


def test_two_versions_of_a_rollout_are_two_spans_in_order(
    request_of: MakeRequest, run_async: RunAsync
) -> None:
    time = HeldTime()
    engine = stub(time.sleep, sync_s=0.0)

    async def main() -> Any:
        await asyncio.gather(engine.set_version(3), released())
        call = asyncio.create_task(engine.generate(request_of("r", samples=20, max_new_tokens=30)))
        await settle()
        syncing = asyncio.create_task(engine.set_version(4))
        await settle()
        time.pass_()  # of the sync, and of the rollout right behind it
        await syncing
        return await call

    async def released() -> None:
        await settle()
        time.pass_()

    result = run_async(main())
    for length, spans in zip(np.diff(result.offsets), result.version_spans, strict=True):
        assert [version for version, _ in spans] == ([3, 4] if length > 1 else [4])
        assert all(count > 0 for _, count in spans)


async def test_an_open_id_is_refused(request_of: MakeRequest) -> None:
    engine = stub(HeldTime().sleep)

    call = asyncio.create_task(engine.generate(request_of("r")))
    await settle()
    with pytest.raises(InvalidRequest, match="is open"):
        await engine.generate(request_of("r"))
    call.cancel()
    await asyncio.wait((call,))
    assert engine.running == 0


async def test_a_closed_engine_fails_open_calls_and_later_ones(request_of: MakeRequest) -> None:
    engine = stub(HeldTime().sleep)

    call = asyncio.create_task(engine.generate(request_of("r")))
    await settle()
    await engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await call
    with pytest.raises(EngineUnavailable, match="closed"):
        await engine.generate(request_of("q"))
