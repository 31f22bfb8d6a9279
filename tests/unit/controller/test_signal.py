import asyncio

import pytest

from offbeat.controller.signal import Signal
from tests.support.virtual_time import run


def test_what_holds_already_is_not_waited_for() -> None:
    waiting = Signal().wait_for(lambda: True)
    with pytest.raises(StopIteration):
        waiting.send(None)


async def test_a_waiter_looks_again_at_every_notification_and_returns_once_it_holds() -> None:
    signal, seen, value = Signal(), list[int](), 0

    def is_two() -> bool:
        seen.append(value)
        return value == 2

    waiter = asyncio.ensure_future(signal.wait_for(is_two))
    for next_value in (0, 1, 2):
        await asyncio.sleep(1)
        assert not waiter.done()
        value = next_value
        signal.notify()
    await waiter
    assert seen == [0, 0, 1, 2, 2]  # once more by whoever was woken


async def test_every_waiter_is_woken_and_a_cancelled_one_takes_nothing_from_the_others() -> None:
    signal, open_ = Signal(), False
    waiters = [asyncio.ensure_future(signal.wait_for(lambda: open_)) for _ in range(3)]
    await asyncio.sleep(1)
    open_ = True
    signal.notify()
    waiters[0].cancel()  # woken, and not yet run
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [True, True], "the value of the predicate"


def test_what_held_still_holds_when_the_waiter_goes_on() -> None:
    async def main() -> None:
        signal, room, taken = Signal(), 1, list[int]()

        async def take(who: int) -> None:
            nonlocal room
            await signal.wait_for(lambda: room > 0)
            assert room > 0
            room -= 1
            taken.append(who)

        takers = [asyncio.ensure_future(take(who)) for who in range(3)]
        for _ in range(3):
            await asyncio.sleep(1)
            assert room == 0, "one of those woken took it, the others wait on"
            room = 1
            signal.notify()
        await asyncio.gather(*takers)
        assert sorted(taken) == [0, 1, 2]

    run(main())


async def test_notifying_nobody_is_not_remembered() -> None:
    signal = Signal()
    signal.notify()
    waiter = asyncio.ensure_future(signal.wait_for(lambda: False))
    await asyncio.sleep(1)
    assert not waiter.done()
    waiter.cancel()


async def test_a_waiter_may_be_woken_twice_before_it_runs_and_after_it_was_cancelled() -> None:
    signal = Signal()
    waiters = [asyncio.ensure_future(signal.wait_for(lambda: False)) for _ in range(2)]
    await asyncio.sleep(1)
    signal.notify()
    signal.notify()
    await asyncio.sleep(1)
    waiters[0].cancel()
    signal.notify()
    await asyncio.sleep(1)
    assert [waiter.done() for waiter in waiters] == [True, False]
    waiters[1].cancel()
