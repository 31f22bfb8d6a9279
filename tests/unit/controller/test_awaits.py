import asyncio

import pytest

from offbeat.controller.pending_waits import PendingWaits
from offbeat.messages.failures import ActorLost, Component, DeadlineExceeded


async def after(seconds: float, value: str = "done") -> str:
    await asyncio.sleep(seconds)
    return value


async def test_a_reply_in_time_is_returned_and_no_longer_listed() -> None:
    awaits = PendingWaits()
    reply = awaits.call(
        "train pump",
        target="the trainer",
        component=Component.TRAINER,
        deadline_s=5,
        reply=after(4, "reply"),
    )
    assert await reply == "reply"
    assert awaits.oldest() == ""


async def test_an_overdue_call_is_cancelled_and_names_who_waited_for_whom_and_how_long() -> None:
    awaits, reply = PendingWaits(), asyncio.ensure_future(after(60))
    with pytest.raises(DeadlineExceeded) as overdue:
        await awaits.call(
            "sync of version 3",
            target="generator-1",
            component=Component.TRAINER,
            deadline_s=2.5,
            reply=reply,
        )
    assert asyncio.get_running_loop().time() == 2.5
    assert str(overdue.value) == (
        "sync of version 3 waited for generator-1 longer than its deadline of 2.5 s"
    )
    assert reply.cancelled()
    assert awaits.oldest() == ""


async def test_a_timeout_of_the_callee_is_not_ours() -> None:
    async def times_out() -> str:
        await asyncio.sleep(1)
        raise TimeoutError("the callee's own")

    with pytest.raises(TimeoutError, match="the callee's own"):
        await PendingWaits().call(
            "a pump",
            target="an actor",
            component=Component.ENGINE,
            deadline_s=2,
            reply=times_out(),
        )


async def test_a_cancel_from_outside_stays_a_cancel_and_reaches_the_reply() -> None:
    awaits, reply = PendingWaits(), asyncio.ensure_future(after(60))
    call = asyncio.ensure_future(
        awaits.call("a", target="b", component=Component.TRAINER, deadline_s=9, reply=reply)
    )
    await asyncio.sleep(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert reply.cancelled()
    assert awaits.oldest() == ""


async def test_a_remote_call_within_its_deadline_is_a_sign_of_progress_and_other_waits_are_none() -> (
    None
):
    awaits = PendingWaits()
    assert awaits.healthy_until == -float("inf")
    waits = [
        asyncio.ensure_future(each)
        for each in (
            awaits.local("a pump", target="room", until=asyncio.sleep(50)),
            awaits.call(
                "a probe",
                target="b",
                component=Component.TRAINER,
                deadline_s=99,
                reply=after(50),
                background=True,
            ),
        )
    ]
    await asyncio.sleep(1)
    assert awaits.healthy_until == -float("inf")
    waits += [
        asyncio.ensure_future(
            awaits.call("c", target="d", component=Component.TRAINER, deadline_s=s, reply=after(50))
        )
        for s in (70, 80)
    ]
    await asyncio.sleep(1)
    assert awaits.healthy_until == 81
    await asyncio.gather(*waits)


async def test_the_list_shows_the_oldest_waits_first_and_counts_the_others() -> None:
    awaits, loop = PendingWaits(), asyncio.get_running_loop()
    assert awaits.describe(loop.time()) == "nobody waits for a remote call"
    calls = list[asyncio.Future[str]]()
    for number in range(8):
        calls.append(
            asyncio.ensure_future(
                awaits.call(
                    f"pump {number}",
                    target="x",
                    component=Component.TRAINER,
                    deadline_s=99,
                    reply=after(50),
                )
            )
        )
        await asyncio.sleep(1)
    assert awaits.oldest() == "pump 0: x"
    assert awaits.describe(loop.time()) == (
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

    call = PendingWaits().call(
        "a pump", target="an actor", component=Component.ENGINE, deadline_s=2, reply=cleans_up()
    )
    if answers:
        assert await call == "all the same"
    else:
        with pytest.raises(DeadlineExceeded):
            await call
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
