"""The controller's actor: what it is told while its run is still being built."""

import asyncio

from offbeat.actors.controller_actor import ControllerActor


class RecordingRun:
    """A run that records the commands it is given and ends at once."""

    def __init__(self) -> None:
        self.commands = list[bytes]()

    def status(self) -> bytes:
        return b""

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def control(self, command: bytes) -> None:
        self.commands.append(command)

    async def run(self) -> bytes:
        return b"the summary"


def test_a_command_that_comes_while_the_run_is_built_is_given_to_it() -> None:
    async def story() -> None:
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

    asyncio.run(story())
