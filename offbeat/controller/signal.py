"""Defines a condition variable without a lock, because one thread owns all the state."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Signal:
    """A condition without a lock.

    Once ``predicate`` holds, ``wait_for`` returns without suspending. So the predicate still holds
    when the caller continues, until the caller awaits. After any number of ``notify`` calls in one
    turn of the event loop, each predicate is checked once, and only waiters with a true predicate
    are woken. A change costs a few calls, not a task switch per waiter.
    """

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], Callable[[], object]] = {}
        self._look_is_due = False

    async def wait_for(self, predicate: Callable[[], T | None]) -> T:
        """Wait until the value of ``predicate`` is true, then return this value.

        Returns at once if the value is true now. Exceptions of the predicate are raised here.
        """
        while not (value := predicate()):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = predicate
            try:
                await waiter
            finally:
                del self._waiters[waiter]
        return value

    def notify(self) -> bool:
        """Have every waiter check its predicate again. Return False if that was due already.

        The caller must call this after the change, from the event loop.
        """
        if self._look_is_due:
            return False
        if self._waiters:
            self._look_is_due = True
            asyncio.get_running_loop().call_soon(self._look)
        return True

    def _look(self) -> None:
        self._look_is_due = False
        for waiter, predicate in self._waiters.items():
            if waiter.done():
                continue
            try:
                calls_for_attention = bool(predicate())
            except Exception:  # noqa: BLE001 - the waiting task evaluates it again, and raises it
                calls_for_attention = True
            if calls_for_attention:
                waiter.set_result(None)
