import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from offbeat.controller.pending_waits import PendingWaits
from offbeat.messages.failures import ActorLost, Component, DeadlineExceeded


async def after(seconds: float, value: str = "done") -> str:
    await asyncio.sleep(seconds)
    return value


async def call(
    waits: PendingWaits,
    reply: Awaitable[str],
    deadline_s: float,
    *,
    waiter: str = "a pump",
    target: str = "an actor",
    **options: Any,
) -> str:
    return await waits.call(
        waiter,
        target=target,
        component=Component.TRAINER,
        deadline_s=deadline_s,
        reply=reply,
        **options,
    )


async def test_a_reply_in_time_is_returned_and_no_longer_listed() -> None:
    waits = PendingWaits()
    assert await call(waits, after(4, "reply"), deadline_s=5) == "reply"
    assert waits.oldest() == ""


async def test_an_overdue_call_is_cancelled_and_names_who_waited_for_whom_and_how_long() -> None:
    waits, reply = PendingWaits(), asyncio.ensure_future(after(60))
    with pytest.raises(DeadlineExceeded) as overdue:
        await call(waits, reply, 2.5, waiter="sync of version 3", target="generator-1")
    assert asyncio.get_running_loop().time() == 2.5
    assert str(overdue.value) == (
        "sync of version 3 waited for generator-1 longer than its deadline of 2.5 s"
    )
    assert reply.cancelled()
    assert waits.oldest() == ""


async def test_a_timeout_of_the_callee_is_not_ours() -> None:
    async def times_out() -> str:
        await asyncio.sleep(1)
        raise TimeoutError("the callee's own")

    with pytest.raises(TimeoutError, match="the callee's own"):
        await call(PendingWaits(), times_out(), deadline_s=2)


async def test_a_cancel_from_outside_stays_a_cancel_and_reaches_the_reply() -> None:
    waits, reply = PendingWaits(), asyncio.ensure_future(after(60))
    calling = asyncio.ensure_future(call(waits, reply, deadline_s=9))
    await asyncio.sleep(1)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert reply.cancelled()
    assert waits.oldest() == ""


async def test_a_remote_call_within_its_deadline_is_a_sign_of_progress_and_other_waits_are_none() -> (
    None
):
    waits = PendingWaits()
    assert waits.healthy_until == -float("inf")
    local = waits.local("a pump", target="room", until=asyncio.sleep(50))
    probe = call(waits, after(50), deadline_s=99, background=True)
    others = [asyncio.ensure_future(each) for each in (local, probe)]
    await asyncio.sleep(1)
    assert waits.healthy_until == -float("inf")
    calls = [asyncio.ensure_future(call(waits, after(50), deadline_s=s)) for s in (70, 80)]
    await asyncio.sleep(1)
    assert waits.healthy_until == 81
    await asyncio.gather(*others, *calls)


async def test_the_list_shows_the_oldest_waits_first_and_counts_the_others() -> None:
    waits, loop = PendingWaits(), asyncio.get_running_loop()
    assert waits.describe(loop.time()) == "nobody waits for a remote call"
    calls = list[asyncio.Future[str]]()
    for number in range(8):
        waiting = call(waits, after(50), 99, waiter=f"pump {number}", target="x")
        calls.append(asyncio.ensure_future(waiting))
        await asyncio.sleep(1)
    assert waits.oldest() == "x (pump 0)"
    assert waits.describe(loop.time()) == (
        "pump 0 waits for x for 8 s; pump 1 waits for x for 7 s; pump 2 waits for x for 6 s; "
        "pump 3 waits for x for 5 s; pump 4 waits for x for 4 s; pump 5 waits for x for 3 s; "
        "2 more wait"
    )
    await asyncio.gather(*calls)


@pytest.mark.parametrize("answers", [False, True])
async def test_a_late_call_that_does_not_take_its_cancel_leaves_the_caller_uncancelled(
    *, answers: bool
) -> None:
    async def cleans_up() -> str:
        try:
            return await after(60)
        except asyncio.CancelledError:
            if answers:
                return "all the same"
            raise ActorLost("actor", "cleanup", "it is gone") from None

    late = call(PendingWaits(), cleans_up(), deadline_s=2)
    if answers:
        assert await late == "all the same"
    else:
        with pytest.raises(DeadlineExceeded):
            await late
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
