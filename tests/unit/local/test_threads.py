"""Threads of a local run: an executor that holds nothing up."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Future

import pytest

from offbeat.environments.exits import ExitRaised
from offbeat.local.threads import LoopThread, WorkThread


def test_a_work_thread_runs_calls_in_their_order_and_passes_on_results_and_errors() -> None:
    thread, order = WorkThread("worker"), list[int]()

    def call(number: int) -> int:
        order.append(number)
        return 10 // number

    futures = [thread.submit(call, number) for number in (5, 2, 0, 1)]
    assert [futures[0].result(), futures[1].result(), futures[3].result()] == [2, 5, 10]
    with pytest.raises(ZeroDivisionError):
        futures[2].result()
    assert order == [5, 2, 0, 1]
    thread.shutdown()


def test_a_work_thread_skips_calls_that_were_cancelled_before_their_turn() -> None:
    thread, free = WorkThread("worker"), threading.Event()
    first: Future[bool] = thread.submit(free.wait)
    second = thread.submit(int, 1)
    assert second.cancel()
    free.set()
    assert first.result()
    with pytest.raises(CancelledError):
        second.result()
    thread.shutdown()
    with pytest.raises(RuntimeError, match="worker was shut down"):
        thread.submit(int, 1)


def test_a_loop_thread_survives_exits_of_tasks_and_callbacks() -> None:
    async def exit_in_callback() -> str:
        loop = asyncio.get_running_loop()
        loop.call_soon(sys.exit, 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "continued"

    async def exit_in_task() -> str:
        sys.exit(3)

    async def main() -> None:
        assert await thread.call(exit_in_callback) == "continued"
        with pytest.raises(ExitRaised, match=r"SystemExit: 3"):
            await thread.call(exit_in_task)

    thread = LoopThread("rollouts")
    asyncio.run(main())
    thread.stop(30)
    assert not thread.thread.is_alive() and thread.loop.is_closed()


def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    source = (
        "import threading; from offbeat.local.threads import LoopThread, WorkThread\n"
        "begun = threading.Event()\n"
        "WorkThread('stuck').submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "LoopThread('rollouts')\n"
        "begun.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], timeout=60, check=False)
    assert done.returncode == 0
