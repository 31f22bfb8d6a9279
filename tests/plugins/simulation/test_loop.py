import asyncio
import gc
import random
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from offbeat.plugins.simulation.loop import Deadlock, OutOfBounds, VirtualLoop
from offbeat.plugins.simulation.processes import OUTSIDE, Process

T = TypeVar("T")


def make_loop(seed: int = 0, *, max_events: int = 10_000, max_s: float = 1000.0) -> VirtualLoop:
    return VirtualLoop(random.Random(seed), max_events=max_events, max_s=max_s)


def run(loop: VirtualLoop, main: Coroutine[object, object, T]) -> T:
    try:
        return loop.run_until_complete(loop.create_task(main))
    finally:
        loop.close()


def start(loop: VirtualLoop, process: Process, work: Coroutine[object, object, None]) -> None:
    loop.create_task(work, context=process.context)


def test_the_clock_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop, seen = asyncio.get_running_loop(), list[float]()
        for delay_s in (5.0, 0.5, 1000.0):
            await asyncio.sleep(delay_s)
            seen.append(loop.time())
        return seen

    assert run(make_loop(max_s=2000), main()) == [5.0, 5.5, 1005.5]


def order_of_ten(seed: int) -> list[int]:
    seen = list[int]()

    async def main() -> None:
        events = [asyncio.Event() for _ in range(10)]

        async def wait(number: int) -> None:
            await events[number].wait()
            seen.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(wait(number))
            await asyncio.sleep(1)
            for event in events:
                event.set()

    run(make_loop(seed), main())
    return seen


def test_what_is_ready_at_once_runs_in_an_order_that_the_seed_draws() -> None:
    assert order_of_ten(1) == order_of_ten(1)
    assert len({tuple(order_of_ten(seed)) for seed in range(8)}) > 1


def test_tasks_of_one_process_start_in_the_order_they_were_created() -> None:
    seen = list[int]()

    async def step(number: int) -> None:
        seen.append(number)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(step(number))

    run(make_loop(3), main())
    assert seen == list(range(20))


def test_a_set_of_tasks_has_the_same_order_in_every_run() -> None:
    def cancelled_order() -> list[int]:
        seen = list[int]()

        async def wait(number: int) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                seen.append(number)

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(30):
                    group.create_task(wait(number))
                await asyncio.sleep(1)
                raise ValueError("all the others are cancelled")

        with pytest.raises(ExceptionGroup):
            run(make_loop(5), main())
        return seen

    first = cancelled_order()
    ballast = [object() for _ in range(10_000)]
    assert cancelled_order() == first and ballast


def test_a_killed_process_runs_nothing_any_more_not_even_its_clean_up() -> None:
    loop, seen, process = make_loop(), list[str](), Process("victim")

    async def victim() -> None:
        try:
            await asyncio.sleep(2)
            seen.append("went on")
        finally:
            seen.append("cleaned up")

    async def main() -> list[str]:
        await asyncio.sleep(1)
        loop.kill(process)
        await asyncio.sleep(10)
        return list(seen)

    start(loop, process, victim())
    assert run(loop, main()) == []


def test_a_frozen_process_goes_on_where_it_was_when_it_is_thawed() -> None:
    loop, seen, process = make_loop(), list[float](), Process("sleeper")

    async def sleeper() -> None:
        for _ in range(2):
            await asyncio.sleep(2)
            seen.append(loop.time())

    async def main() -> None:
        await asyncio.sleep(1)
        loop.freeze(process)
        await asyncio.sleep(10)
        loop.thaw(process)
        await asyncio.sleep(10)

    start(loop, process, sleeper())
    run(loop, main())
    assert seen == [11.0, 13.0]


def test_a_future_wakes_its_waiter_in_the_waiters_process() -> None:
    loop, process = make_loop(), Process("waiter")
    reply = loop.create_future()
    seen = list[str]()

    async def waiter() -> None:
        seen.append(await reply)

    async def main() -> None:
        await asyncio.sleep(1)
        loop.kill(process)
        reply.set_result("too late")
        await asyncio.sleep(1)

    start(loop, process, waiter())
    run(loop, main())
    assert seen == []


def test_nothing_ready_and_no_timer_is_a_deadlock_that_names_who_waits() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    loop = make_loop()
    with pytest.raises(Deadlock, match="unfinished tasks: forever"):
        loop.run_until_complete(loop.create_task(main(), name="forever"))
    loop.close()


@pytest.mark.parametrize("pause_s", [0.0, 1.0], ids=["busy", "slow"])
def test_an_episode_is_bounded_in_events_and_in_time(pause_s: float) -> None:
    async def main() -> None:
        for _ in range(10**9):
            await asyncio.sleep(pause_s)

    with pytest.raises(OutOfBounds, match="not over after"):
        run(make_loop(max_events=500, max_s=300), main())


def test_an_error_of_a_callback_outside_ends_the_episode() -> None:
    def fail() -> None:
        raise LookupError("of the machinery")

    async def main() -> None:
        await asyncio.sleep(5)

    loop = make_loop()
    loop.at(1.0, OUTSIDE, fail)
    with pytest.raises(LookupError):
        run(loop, main())


def test_what_a_dead_process_leaves_is_disposed_of_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop, process = make_loop(), Process("stubborn")

    async def stubborn() -> None:
        async def child() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(1)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                await asyncio.sleep(100)
        finally:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())

    async def main() -> None:
        await asyncio.sleep(1)
        loop.kill(process)

    start(loop, process, stubborn())
    run(loop, main())
    gc.collect()
    assert capsys.readouterr().err == ""
