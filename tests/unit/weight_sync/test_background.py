"""Blocking work in a thread, whose caller may be gone when it ends."""

import asyncio
import threading

import pytest

from offbeat.weight_sync.background import in_thread


def test_the_result_or_the_error_of_the_work_is_the_callers() -> None:
    def fail() -> None:
        raise ValueError("torn")

    assert asyncio.run(in_thread("work", lambda: 3)) == 3
    with pytest.raises(ValueError, match="torn"):
        asyncio.run(in_thread("work", fail))


@pytest.mark.parametrize("is_loop_closed", [False, True])
def test_work_that_ends_after_its_caller_was_cancelled_disturbs_nobody(
    is_loop_closed: bool,
) -> None:
    begun, go_on, threads = threading.Event(), threading.Event(), list[threading.Thread]()
    problems = list[object]()

    def work() -> None:
        threads.append(threading.current_thread())
        begun.set()
        assert go_on.wait(30)

    def end() -> None:
        go_on.set()
        threads[0].join(30)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: problems.append(told))
        call = asyncio.create_task(in_thread("work", work))
        await asyncio.to_thread(begun.wait, 30)
        call.cancel()
        await asyncio.wait([call])
        if not is_loop_closed:
            await asyncio.to_thread(end)
            await asyncio.sleep(0)  # the loop takes what the thread has handed over

    asyncio.run(main())
    if is_loop_closed:
        end()  # an error in the thread would be a warning, and so fail this test
    assert not threads[0].is_alive()
    assert problems == []
