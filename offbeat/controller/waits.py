"""Names the waits of a run's pumps: for a change, for a reply, for a back-off."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from offbeat.controller.observer import Observer
from offbeat.controller.pending_waits import PendingWaits, Pump
from offbeat.controller.ports import Journal
from offbeat.controller.signal import Signal
from offbeat.messages.failures import Component
from offbeat.telemetry.status_file import NamedWait

T = TypeVar("T")
_JOURNAL_DEADLINE_S: Final = 120.0


class Waits(PendingWaits):
    """Named waits, and the notification that ends the waits for a change.

    The objects that own the run's state call ``changed`` after each change of it. Pumps do not. The
    end of a back-off is a change too.
    """

    def __init__(self, journal: Journal, observer: Observer) -> None:
        """Create the waits on the event loop that times them."""
        super().__init__()
        self._journal, self._observer = journal, observer
        self._clock = asyncio.get_running_loop().time
        self._signal = Signal()
        self.changed_at = 0.0  # event loop's clock

    def changed(self) -> None:
        """Have every waiting task check its predicate again. This counts as progress."""
        if self._signal.notify():
            self.changed_at = self._clock()

    def named(self) -> tuple[NamedWait, ...]:
        """Return the longest waits in progress, for people."""
        return self.list_longest(self._clock())

    async def until(
        self, pump: Pump, target: str, predicate: Callable[[], T | None], *, waiter: str = ""
    ) -> T:
        """Wait until ``predicate`` holds, under the name of the pump or of its call ``waiter``.

        Return the predicate's value, which stays true for the caller until the caller awaits.
        """
        value = predicate()
        if not value:
            since = self._clock()
            until = self._signal.wait_for(predicate)
            value = await self.local(waiter or pump, target=target, until=until, pump=pump)
            self._observer.waited(pump, target, since)
        return value

    async def wait_unlisted(self, predicate: Callable[[], bool]) -> None:
        """Wait until ``predicate`` holds. The watchdog does not list the wait."""
        await self._signal.wait_for(predicate)

    async def durable(self, waiter: str) -> None:
        """Wait until everything recorded so far would survive a crash.

        Raises:
            DeadlineExceeded: The disk needs more than two minutes.
            JournalFailed: The disk refused.
            JournalTaken: A newer controller writes this journal.
        """
        await self.call(
            waiter,
            target="the journal",
            component=Component.JOURNAL,
            deadline_s=_JOURNAL_DEADLINE_S,
            reply=self._journal.barrier(),
        )

    async def pause(self, waiter: str, *, target: str, for_s: float) -> None:
        """Wait for a back-off. The watchdog waits until it is over, too. Its end is a change."""
        await super().pause(waiter, target=target, for_s=for_s)
        self.changed()
