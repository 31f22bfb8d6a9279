"""The asyncio face: nothing touches the engine during a step, and nobody waits for ever."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import pytest

from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.engine_loop import EngineLoop
from offbeat.messages.failures import EngineUnavailable, InvalidRequest
from offbeat.messages.generation import GenerateRequest, GenerateResult
from tests.support.generator_fixtures import MakeEngine, MakeRequest

pytestmark = pytest.mark.real_clock

InLoop = Callable[[], AbstractAsyncContextManager[tuple[EngineLoop, "WatchedEngine"]]]


class WatchedEngine(EmbeddedEngine):
    """A real engine that notices two calls at once, and holds or breaks a step on demand."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._busy = threading.Lock()
        self.threads: set[int] = set()
        self.tokens_of_steps: list[int] = []
        self.steps_until_broken: int | None = None
        self.may_step = threading.Event()
        self.may_step.set()
        self.in_step = threading.Event()

    @contextmanager
    def alone(self) -> Iterator[None]:
        assert self._busy.acquire(blocking=False), "two calls at once"
        self.threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._busy.release()

    def submit(self, request: GenerateRequest) -> None:
        with self.alone():
            super().submit(request)

    def drop(self, request_id: str) -> None:
        with self.alone():
            super().drop(request_id)

    def set_version(self, version: int) -> None:
        with self.alone():
            super().set_version(version)

    def step(self) -> list[GenerateResult]:
        with self.alone():
            self.in_step.set()
            assert self.may_step.wait(30)
            if self.steps_until_broken == len(self.tokens_of_steps):
                raise ArithmeticError("a step broke")
            before = self.tokens
            finished = super().step()
            self.tokens_of_steps.append(self.tokens - before)
            return finished


@pytest.fixture
def in_loop(make_engine: MakeEngine) -> InLoop:
    """A loop around a watched engine; it is closed at the end of the block."""

    @asynccontextmanager
    async def enter() -> AsyncIterator[tuple[EngineLoop, WatchedEngine]]:
        engine = make_engine(kind=WatchedEngine)
        assert isinstance(engine, WatchedEngine)
        loop = EngineLoop(engine)
        try:
            async with asyncio.timeout(30):
                yield loop, engine
        finally:
            engine.may_step.set()
            await loop.close()

    return enter


async def until_running(loop: EngineLoop) -> None:
    """Returns once rows are being decoded."""
    while not await loop.between_steps(lambda engine: engine.running):
        pass


async def test_many_callers_get_their_own_answers(in_loop: InLoop, request_of: MakeRequest) -> None:
    async with in_loop() as (loop, engine):
        requests = [request_of(str(n), samples=2, max_new_tokens=n % 7 + 1) for n in range(40)]
        results = await asyncio.gather(*map(loop.generate, requests))
        for number, result in enumerate(results):
            assert result.request_id == str(number)
            assert len(result.token_ids) == 2 * (number % 7 + 1)
        assert threading.get_ident() not in engine.threads
        assert len(engine.threads) == 1


async def test_callers_of_one_turn_share_the_first_prefill(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, engine):
        calls = (loop.generate(request_of(str(n), max_new_tokens=1)) for n in range(5))
        await asyncio.gather(*calls)
        assert engine.tokens_of_steps == [5]


async def test_the_event_loop_stays_free_during_a_step(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, engine):
        engine.may_step.clear()
        call = asyncio.create_task(loop.generate(request_of("r")))
        assert await asyncio.to_thread(engine.in_step.wait, 30)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.done()
        engine.may_step.set()
        assert len((await call).token_ids) == 16


async def test_rows_go_on_behind_what_is_done_between_two_steps(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    def swap(engine: EmbeddedEngine) -> int:
        engine.set_version(9)
        return engine.tokens

    async with in_loop() as (loop, _):
        call = asyncio.create_task(loop.generate(request_of("r", max_new_tokens=100)))
        await until_running(loop)
        before = await loop.between_steps(swap)
        assert (await call).version_spans == (((0, before), (9, 100 - before)),)


async def test_between_steps_passes_on_values_and_errors_without_breaking_the_engine(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, _):

        def fail(_: EmbeddedEngine) -> None:
            raise KeyError("weights")

        assert await loop.between_steps(lambda engine: engine.name) == "engine-0"
        with pytest.raises(KeyError, match="weights"):
            await loop.between_steps(fail)
        assert len((await loop.generate(request_of("r"))).token_ids) == 16


async def test_a_refused_request_fails_its_caller_alone(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, _):
        good, bad = await asyncio.gather(
            loop.generate(request_of("good")),
            loop.generate(request_of("bad", prompt=())),
            return_exceptions=True,
        )
        assert isinstance(good, GenerateResult)
        assert isinstance(bad, InvalidRequest)


async def test_an_open_id_is_refused_and_the_first_caller_undisturbed(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, _):
        first = asyncio.create_task(loop.generate(request_of("r", max_new_tokens=50)))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="is open"):
            await loop.generate(request_of("r"))
        assert len((await first).token_ids) == 50


async def test_a_cancelled_caller_takes_its_request_out_of_the_engine(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, _):
        call = asyncio.create_task(loop.generate(request_of("r", max_new_tokens=100)))
        await until_running(loop)
        call.cancel()
        await asyncio.wait((call,))
        assert not await loop.between_steps(lambda engine: engine.has_work)
        assert loop.tokens < 100
        assert len((await loop.generate(request_of("r"))).token_ids) == 16


async def test_a_step_that_raises_fails_every_open_call_and_every_later_one(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, engine):
        engine.steps_until_broken = 3
        calls = (loop.generate(request_of(id_)) for id_ in "ab")
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, EngineUnavailable)
            assert "a step broke" in str(outcome)
            assert isinstance(outcome.__cause__, ArithmeticError)
        for call in (loop.generate(request_of("c")), loop.between_steps(lambda _: None)):
            with pytest.raises(EngineUnavailable, match="a step broke"):
                await call


async def test_close_fails_open_calls_and_ends_the_thread(
    make_engine: MakeEngine, request_of: MakeRequest
) -> None:
    loop = EngineLoop(make_engine())
    call = asyncio.create_task(loop.generate(request_of("r", max_new_tokens=120)))
    await until_running(loop)
    await loop.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await call
    with pytest.raises(EngineUnavailable, match="closed"):
        await loop.between_steps(lambda _: None)
    await loop.close()
    assert not [thread for thread in threading.enumerate() if "engine-0-steps" in thread.name]


async def test_nothing_is_lost_when_calls_arrive_while_the_thread_is_ending(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, _):
        for number in range(300):
            result = await loop.generate(request_of(str(number), max_new_tokens=1))
            assert len(result.token_ids) == 1


class Turns:
    """Turns that a test grants and takes back."""

    def __init__(self) -> None:
        self.may_begin = True
        self.refused: list[Callable[[], object]] = []
        self.open_steps = 0

    def begin(self, retry: Callable[[], object]) -> bool:
        if self.may_begin:
            self.open_steps += 1
        else:
            self.refused.append(retry)
        return self.may_begin

    def end(self) -> None:
        self.open_steps -= 1


async def test_an_engine_that_may_not_step_executes_commands_and_goes_on_when_it_may(
    make_engine: MakeEngine, request_of: MakeRequest
) -> None:
    engine, turns = make_engine(kind=WatchedEngine), Turns()
    assert isinstance(engine, WatchedEngine)
    loop = EngineLoop(engine, turns=turns)
    await loop.between_steps(lambda _: setattr(turns, "may_begin", False))
    answer = asyncio.ensure_future(loop.generate(request_of("a", max_new_tokens=3)))
    while not turns.refused:
        await loop.between_steps(lambda _: None)
    assert engine.tokens_of_steps == []
    assert loop.waiting == 1
    turns.may_begin = True
    turns.refused[-1]()
    assert len((await asyncio.wait_for(answer, 30)).token_ids) == 3
    assert turns.open_steps == 0
    engine.steps_until_broken = len(engine.tokens_of_steps)
    with pytest.raises(EngineUnavailable):
        await loop.generate(request_of("b"))
    assert turns.open_steps == 0
    await loop.close()


async def test_a_failed_engine_says_why_and_answers_nothing(
    in_loop: InLoop, request_of: MakeRequest
) -> None:
    async with in_loop() as (loop, engine):
        engine.may_step.clear()
        answer = asyncio.ensure_future(loop.generate(request_of("a")))
        await until_called(engine)
        loop.fail("its weights are gone")
        engine.may_step.set()
        for call in (answer, loop.generate(request_of("b"))):
            with pytest.raises(EngineUnavailable, match="its weights are gone"):
                await call


async def until_called(engine: WatchedEngine) -> None:
    """Returns once the engine is in a step."""
    assert await asyncio.to_thread(engine.in_step.wait, 30)
