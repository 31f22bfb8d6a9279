"""Limits the calls of an async reward function, such as a judge behind HTTP.

The limits are simultaneous calls, calls per second, and retries. A call that raises an error named
by the recipe is retried after a growing wait, or after the wait that the service asked for
(``EnvironmentUnavailable.retry_after_s``). The caller's deadline covers all tries. The limits hold
within one reward process. The only clock is the event loop's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from offbeat.config.user_code import describe
from offbeat.environments.protocol import EnvironmentUnavailable
from offbeat.environments.reward_value import unavailable

_FIRST_WAIT_S: Final = 0.25
"""Wait before the first retry. It is doubled before each further retry."""


class CallLimits(msgspec.Struct, frozen=True):
    """Limits of the calls in one reward process."""

    deadline_s: float  # of one call with its retries, less than the caller's own
    concurrency: int  # calls open at once
    calls_per_s: float | None = None
    retries: int = 0  # of one call
    retry_on: tuple[str, ...] = ()  # names of error classes, besides ``EnvironmentUnavailable``


class AsyncCalls:
    """Makes the calls of an async reward function within its limits."""

    def __init__(
        self,
        reward: Callable[..., Awaitable[object]],
        limits: CallLimits,
        on_try: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the limiter. It calls ``on_try`` before each try, even if the try then fails."""
        self._reward, self._limits, self._on_try = reward, limits, on_try
        self._open = asyncio.Semaphore(limits.concurrency)
        self._next_start_s = 0.0  # time of the event loop before which no call may start

    async def call(self, row: dict[str, object], response: str) -> object:
        """Return the function's value, or ``BadReward`` if its service stays unavailable or slow.

        Raises:
            Exception: The function's error at the last try, unless it means that a service is
                unavailable.
        """
        deadline = asyncio.timeout(self._limits.deadline_s)
        try:
            async with deadline:
                return await self._call_with_retries(row, response)
        except TimeoutError:
            if not deadline.expired():
                raise
            limit_s = self._limits.deadline_s
            late = f"no reward within {limit_s:.3g} s: its service is slow or down"
            return unavailable(late)

    async def _call_with_retries(self, row: dict[str, object], response: str) -> object:
        retry = 0
        while True:
            async with self._open:
                await self._pace()
                self._on_try()
                try:
                    return await self._reward(row, response)
                except Exception as error:
                    if retry == self._limits.retries or not self._is_passing(error):
                        if isinstance(error, EnvironmentUnavailable):
                            return unavailable(describe(error))
                        raise
                    wait_s = _FIRST_WAIT_S * 2**retry
                    if isinstance(error, EnvironmentUnavailable):
                        wait_s = max(wait_s, error.retry_after_s)
            retry += 1
            await asyncio.sleep(wait_s)  # holds no place meanwhile: other calls may run

    def _is_passing(self, error: Exception) -> bool:
        """Return whether a call is retried after this error."""
        if isinstance(error, EnvironmentUnavailable):
            return True
        names = {kind.__name__ for kind in type(error).__mro__}
        return not names.isdisjoint(self._limits.retry_on)

    async def _pace(self) -> None:
        """Wait until the rate allows one more call. Calls start evenly, without bursts."""
        rate = self._limits.calls_per_s
        if rate is None:
            return
        now = asyncio.get_running_loop().time()
        start_s = max(now, self._next_start_s)
        self._next_start_s = start_s + 1 / rate
        await asyncio.sleep(start_s - now)
