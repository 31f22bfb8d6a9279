"""A driver asks a controller how the run is: the reply, no reply, and a controller that raises."""

import asyncio
from typing import Any

import pytest
import ray

from offbeat.launch.driver import ask_status
from offbeat.messages.failures import RemoteBug


def controller(reply: bytes | Exception | None) -> Any:
    """An actor; its class is of this function, so it is sent by value: actors cannot import tests."""

    class Asked:
        async def status(self) -> bytes | None:
            if isinstance(reply, TimeoutError):
                await asyncio.Event().wait()
            if isinstance(reply, Exception):
                raise reply
            return reply

    return ray.remote(Asked).options(num_cpus=0).remote()


@pytest.mark.usefixtures("local_ray")
def test_a_controller_that_raises_instead_of_replying_is_an_error_and_no_silence() -> None:
    assert ask_status(controller(b"{}"), 60) == b"{}"
    with pytest.raises(RemoteBug, match="controller raised KeyError in its status: 'step'"):
        ask_status(controller(KeyError("step")), 60)
    with pytest.raises(TimeoutError):
        ask_status(controller(TimeoutError()), 1)
