"""What a caller makes of an environment worker that is lost, hangs, or comes back; without Ray."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from offbeat.actors.ray_worker import RayWorker
from offbeat.messages.failures import ActorLost
from tests.support.virtual_time import run


class Process:
    """A handle: each ``ping`` raises what is next in ``failures``; after that it is answered."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.pings = list(failures), 0
        self.ping = self

    def remote(self) -> "asyncio.Future[Any]":
        self.pings += 1
        reply = asyncio.get_running_loop().create_future()
        if self.failures:
            reply.set_exception(self.failures.pop(0))
        else:
            reply.set_result(None)
        return reply


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("it is being started", b"0" * 16)


async def lost(worker: RayWorker) -> None:
    reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    reply.set_exception(unavailable())
    with pytest.raises(ActorLost):
        await worker.answer(reply, "rollout")  # type: ignore[arg-type]


def test_a_group_waits_for_a_worker_that_is_started_again() -> None:
    async def main() -> None:
        process = Process(*[unavailable()] * 3)
        worker = RayWorker("environment-0", process)
        await lost(worker)
        assert worker.gone
        await asyncio.gather(*(worker.back() for _ in range(64)))
        assert not worker.gone
        assert process.pings == 4

    run(main())


def test_a_worker_that_does_not_come_back_is_told_as_lost() -> None:
    async def main() -> None:
        worker = RayWorker("environment-0", Process(*[unavailable()] * 1000))
        await lost(worker)
        with pytest.raises(ActorLost, match="does not answer for 120 s"):
            await worker.back()
        worker.close()

    run(main())


def test_a_worker_that_is_starting_is_not_doubted() -> None:
    async def main() -> None:
        process = Process()
        RayWorker("environment-0", process).doubt()
        await asyncio.sleep(100)
        assert process.pings == 0

    run(main())
