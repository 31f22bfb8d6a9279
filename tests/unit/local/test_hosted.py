"""Parts of a run in threads: calls, failures, replacement."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from offbeat.local.hosted import Hosted
from offbeat.local.threads import LoopThread, WorkThread
from offbeat.messages.failures import ActorLost, EngineUnavailable, RemoteBug, StartFailed

pytestmark = pytest.mark.real_clock


class Part:
    """A part that remembers its calls and the threads that they ran in."""

    def __init__(self, thread: WorkThread) -> None:
        self.made_in, self.threads = threading.current_thread(), list[threading.Thread]()
        self.host = thread.thread

    def note(self) -> int:
        self.threads.append(threading.current_thread())
        return len(self.threads)


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread("rollouts")
    yield thread
    thread.stop()


def blocker() -> tuple[threading.Event, threading.Event, Callable[[Part], None]]:
    """Return when a call has begun, what lets it return, and the call."""
    begun, free = threading.Event(), threading.Event()

    def block(part: Part) -> None:
        part.note()
        begun.set()
        free.wait()

    return begun, free, block


async def until_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


async def test_a_part_is_made_and_called_in_one_thread_in_the_order_of_the_calls() -> None:
    hosted = Hosted("part", Part)
    counts = await asyncio.gather(*(hosted.call("note", Part.note) for _ in range(20)))
    part = hosted.end()
    assert counts == [*range(1, 21)]
    assert part is not None
    assert {part.made_in, *part.threads} == {part.host}


async def test_a_call_that_waits_for_its_part_is_not_overtaken_by_a_later_one() -> None:
    free = threading.Event()

    def make(thread: WorkThread) -> Part:
        free.wait()
        return Part(thread)

    hosted = Hosted("part", make)
    waiting = asyncio.ensure_future(hosted.call("note", Part.note))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    free.set()
    hosted.wait()
    assert await hosted.call("note", Part.note) == 2
    assert await waiting == 1
    hosted.end()


async def test_a_part_that_cannot_be_made_fails_every_call_with_the_reason() -> None:
    def make(thread: WorkThread) -> Part:
        raise ValueError(f"no model for {thread.thread.name}")

    hosted = Hosted("part", make)
    for _ in range(2):
        with pytest.raises(StartFailed) as failed:
            await hosted.call("note", Part.note)
        assert str(failed.value) == "part cannot start: ValueError: no model for part"
    assert hosted.end() is None


async def test_a_typed_failure_keeps_its_class_and_any_other_error_is_a_bug_with_its_place() -> (
    None
):
    def refuse(part: Part) -> None:
        raise EngineUnavailable("part", "answer", "it is broken", "Start another one")

    def divide(part: Part) -> float:
        return part.note() / 0

    hosted = Hosted("part", Part)
    with pytest.raises(EngineUnavailable):
        await hosted.call("refuse", refuse)
    with pytest.raises(RemoteBug) as bug:
        await hosted.call("divide", divide)
    assert str(bug.value).startswith("part raised ZeroDivisionError in divide: division by zero")
    assert 'test_hosted.py"' in str(bug.value)
    hosted.end()


async def test_a_restart_fails_open_calls_as_lost_and_makes_a_new_part() -> None:
    begun, free, block = blocker()
    hosted = Hosted("part", Part)
    call = asyncio.ensure_future(hosted.call("block", block))
    await until_set(begun)
    first = hosted.restart()
    with pytest.raises(ActorLost, match="part was lost during block: it was replaced"):
        await call
    free.set()
    assert await hosted.call("note", Part.note) == 1
    assert hosted.end() is not first is not None


async def test_a_part_that_has_ended_is_lost() -> None:
    hosted = Hosted("part", Part)
    await hosted.call("note", Part.note)
    hosted.end()
    with pytest.raises(ActorLost):
        await hosted.call("note", Part.note)


async def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    begun, free, block = blocker()
    hosted = Hosted("part", Part)
    running = asyncio.ensure_future(hosted.call("block", block))
    await until_set(begun)
    waiting = asyncio.ensure_future(hosted.call("note", Part.note))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    free.set()
    await running
    assert await hosted.call("note", Part.note) == 2
    hosted.end()


async def test_a_coroutine_runs_on_the_loop_of_its_part_and_its_caller_can_cancel_it(
    loop_thread: LoopThread,
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def where(part: Part) -> threading.Thread:
        return threading.current_thread()

    async def wait_forever(part: Part) -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    hosted = Hosted("part", Part)
    assert await hosted.await_on(loop_thread, "where", where) is loop_thread.thread
    call = asyncio.ensure_future(hosted.await_on(loop_thread, "wait", wait_forever))
    await until_set(begun)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until_set(cancelled)
    hosted.end()


async def test_a_restart_also_ends_coroutines_of_the_abandoned_part(
    loop_thread: LoopThread,
) -> None:
    begun = threading.Event()

    async def wait_forever(part: Part) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    hosted = Hosted("part", Part)
    call = asyncio.ensure_future(hosted.await_on(loop_thread, "generate", wait_forever))
    await until_set(begun)
    hosted.restart()
    with pytest.raises(ActorLost, match="during generate"):
        await call
    hosted.end()


async def test_only_one_part_is_made_at_a_time() -> None:
    making, most, lock = 0, 0, threading.Lock()

    def make(thread: WorkThread) -> Part:
        nonlocal making, most
        with lock:
            making += 1
            most = max(most, making)
        part = Part(thread)
        with lock:
            making -= 1
        return part

    parts = [Hosted(f"part-{index}", make) for index in range(8)]
    await asyncio.gather(*(each.call("note", Part.note) for each in parts))
    for each in parts:
        each.end()
    assert most == 1
