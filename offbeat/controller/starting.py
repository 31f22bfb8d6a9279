"""The wait for a process that is starting, until it answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from offbeat.messages.failures import ActorLost, EngineUnavailable
from offbeat.messages.fixed_times import RETRY_S

T = TypeVar("T")
_ATTEMPTS: Final = 5  # each has its part of the start deadline


async def first_answer(call: Callable[[], Awaitable[T]], start_deadline_s: float) -> T:
    """Return the first reply to ``call``; a lost call is repeated.

    The caller bounds the total time.
    """
    while True:
        try:
            async with asyncio.timeout(start_deadline_s / _ATTEMPTS):
                return await call()
        except (ActorLost, EngineUnavailable, TimeoutError):
            await asyncio.sleep(RETRY_S)
