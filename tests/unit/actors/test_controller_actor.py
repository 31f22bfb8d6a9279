"""The controller's actor: what it is told while its run is still being built."""

import asyncio
from typing import Self

from offbeat.actors.controller_actor import ControllerActor
from tests.support.virtual_time import run


class RecordingRun:
    """A run that records the commands it is given and ends at once."""

    def __init__(self) -> None:
        self.commands = list[bytes]()

    @classmethod
    async def built(cls) -> Self:
        return cls()

    def status(self) -> bytes:
        return b""

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def control(self, command: bytes) -> None:
        self.commands.append(command)

    async def run(self) -> bytes:
        return b"the summary"


async def test_a_command_that_comes_while_the_run_is_built_is_given_to_it() -> None:
    run, is_built = RecordingRun(), asyncio.Event()

    async def build() -> RecordingRun:
        await is_built.wait()
        return run

    actor = ControllerActor(build)
    ended = asyncio.ensure_future(actor.run())
    await asyncio.sleep(0)
    await actor.control(b"pause")
    is_built.set()
    assert await ended == b"the summary"
    assert run.commands == [b"pause"]


class EndlessRun(RecordingRun):
    """A run that goes on until it is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def abort(self, reason: str) -> None:
        self.aborted.set_result(reason)

    async def run(self) -> bytes:
        return (await self.aborted).encode()


async def ended_at(actor: ControllerActor, *, asked_every_s: float, until_s: float) -> float:
    """Return when the run ended whose driver asks for its status until then."""
    loop = asyncio.get_running_loop()

    async def ask() -> None:
        while loop.time() + asked_every_s <= until_s:
            await asyncio.sleep(asked_every_s)
            await actor.status()

    asking = asyncio.ensure_future(ask())
    try:
        reason = await actor.run()
    finally:
        asking.cancel()
    assert b"its driver has not asked for its status for 60 s" in reason
    return loop.time()


def test_a_run_ends_in_order_a_minute_after_its_driver_asked_for_its_status_last() -> None:
    actor = ControllerActor(EndlessRun.built)
    assert 560 <= run(ended_at(actor, asked_every_s=0.5, until_s=500)) <= 562


def test_a_driver_that_is_suspended_for_seconds_keeps_its_run() -> None:
    actor = ControllerActor(EndlessRun.built)
    assert run(ended_at(actor, asked_every_s=50, until_s=500)) > 550


def test_a_run_that_loses_its_driver_while_it_is_built_ends_at_its_start() -> None:
    async def build() -> EndlessRun:
        await asyncio.sleep(300)
        return EndlessRun()

    actor = ControllerActor(build)
    assert run(ended_at(actor, asked_every_s=0.5, until_s=10)) == 300


def test_time_in_which_the_controllers_process_stands_still_is_not_its_drivers() -> None:
    """After a freeze its timers are due before the driver's questions are read."""

    async def story() -> bool:
        loop = asyncio.get_running_loop()
        actor = ControllerActor(EndlessRun.built)
        ended = asyncio.ensure_future(actor.run())
        await asyncio.sleep(0.5)
        stood_still_s, clock = 0.0, loop.time
        loop.time = lambda: clock() + stood_still_s  # type: ignore[method-assign]
        stood_still_s = 100.0
        await asyncio.sleep(2)
        is_over = ended.done()
        ended.cancel()
        return is_over

    assert not run(story())
