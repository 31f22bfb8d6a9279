"""Waits for the first answer of a process that is starting."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from offbeat.config.sections.runtime import RuntimeConfig
from offbeat.messages.failures import ActorLost, EngineUnavailable
from offbeat.messages.fixed_times import RETRY_S

T = TypeVar("T")
_ATTEMPTS: Final = 5  # calls within the start deadline, while none of them is answered


async def first_answer(call: Callable[[], Awaitable[T]], start_deadline_s: float) -> T:
    """Return the first reply to ``call``. Repeat the call, because a call or reply may get lost.

    A call without a reply may only be slow, so it stays open. The first reply to any call counts.
    The caller bounds the total time.
    """
    calls = set[asyncio.Future[T]]()
    try:
        while True:
            calls.add(asyncio.ensure_future(call()))
            done, calls = await asyncio.wait(
                calls,
                timeout=start_deadline_s / _ATTEMPTS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for each in done:
                if not isinstance(each.exception(), (ActorLost, EngineUnavailable)):
                    return each.result()
            if done:
                await asyncio.sleep(RETRY_S)
    finally:
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def describe_first_answer(runtime: RuntimeConfig) -> str:
    """Describe the wait for a process to start, with a hint that helps on a cluster."""
    room = " (is there room for it in the cluster?)" if runtime.backend == "ray" else ""
    return f"its first answer{room}"
