"""Event loops that run user code outlive what user code raises, or take their process along."""

import asyncio
import pickle
import subprocess
import sys
from typing import NoReturn

import pytest

from offbeat.environments.exits import LOOP_ENDED, ExitRaised, contain_exits, exits_as_errors


class OwnExit(BaseException):
    """Of a library that wants no ``except Exception`` to see it."""


async def exits(error: BaseException) -> NoReturn:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), OwnExit("own")])
def test_a_task_that_exits_fails_and_its_loop_goes_on(error: BaseException) -> None:
    async def main() -> str:
        contain_exits()
        task = asyncio.create_task(exits(error))
        with pytest.raises(ExitRaised, match=type(error).__name__):
            await task
        return "alive"

    assert asyncio.run(main()) == "alive"


def test_a_task_in_a_group_of_user_code_fails_the_group_like_any_error() -> None:
    async def main() -> None:
        contain_exits()
        async with asyncio.TaskGroup() as group:
            group.create_task(exits(SystemExit(2)))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(ExitRaised, match="SystemExit: 2")


def test_tasks_return_raise_and_are_cancelled_as_before() -> None:
    async def gives() -> int:
        await asyncio.sleep(0)
        return 3

    async def main() -> None:
        contain_exits()
        contain_exits()
        assert await asyncio.create_task(gives(), name="named") == 3
        with pytest.raises(ValueError, match="mine"):
            await asyncio.create_task(exits(ValueError("mine")))
        never_begun = asyncio.create_task(gives())
        never_begun.cancel()
        waiting = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        waiting.cancel()
        for task in (never_begun, waiting):
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_an_error_of_the_block_passes_through_and_an_exit_becomes_one() -> None:
    with pytest.raises(ValueError, match="mine"), exits_as_errors():
        raise ValueError("mine")
    with (
        pytest.raises(ExitRaised, match=r"raised test_exits.py:.* SystemExit: 7") as caught,
        exits_as_errors(),
    ):
        raise SystemExit(7)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - ours


LATER = """
import asyncio, sys, threading
from offbeat.environments.exits import contain_exits

async def contain():
    contain_exits()

together = threading.Barrier(20)

def fail():
    together.wait()
    raise ValueError("mine")

first = threading.Thread(target=asyncio.run, args=[contain()])
first.start()
first.join()
later = [threading.Thread(target=fail) for _ in range(together.parties)]
for each in later:
    each.start()
for each in later:
    each.join()
print("alive", first.ident in {each.ident for each in later})
"""


def test_an_error_of_a_thread_that_follows_an_ended_loop_does_not_end_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATER], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "alive True\n"), ended.stderr


CALLBACK = """
import asyncio, sys, threading
from offbeat.environments.exits import contain_exits

async def main():
    contain_exits()
    asyncio.get_running_loop().call_soon(sys.exit, 3)

loop = asyncio.new_event_loop()
thread = threading.Thread(target=loop.run_forever)
thread.start()
asyncio.run_coroutine_threadsafe(main(), loop)
threading.Event().wait()
"""


def test_a_callback_that_ends_the_loop_of_a_thread_ends_the_process_with_a_word() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CALLBACK], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == LOOP_ENDED
    assert "event_loop.ended" in ended.stdout + ended.stderr
    assert "SystemExit: 3" in ended.stdout + ended.stderr
