"""Wakes whoever waits for a change. There is no lock: one thread owns all the state."""

import asyncio
from collections.abc import Callable


class Signal:
    """A condition without a lock.

    ``wait_for`` returns without suspending after ``predicate`` held, so it still holds for the
    caller until the caller awaits. Every ``notify`` wakes every waiter, so a cancelled waiter takes
    no wake-up away from another.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return once ``predicate`` holds; at once, if it holds now."""
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def notify(self) -> None:
        """Have every waiter look again. Call after the change, from the event loop."""
        for waiter in self._waiters:
            if not waiter.done():  # woken or cancelled, and not yet run
                waiter.set_result(None)
