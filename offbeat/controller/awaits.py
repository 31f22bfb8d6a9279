"""Who waits for whom: every remote call in progress, its name and its deadline."""

import asyncio
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from offbeat.messages.failures import DeadlineExceeded

T = TypeVar("T")
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class Await:
    """One wait in progress. Times are of the event loop's clock."""

    who: str
    on: str
    since: float
    deadline: float  # inf for a wait on our own state: the watchdog judges it


class Awaits:
    """The waits in progress, oldest first."""

    def __init__(self) -> None:
        self._open: dict[Await, None] = {}

    async def call(
        self,
        who: str,
        *,
        on: str,
        deadline_s: float,
        reply: Awaitable[T],
        background: bool = False,
    ) -> T:
        """Await a remote reply under its name.

        A ``background`` call, such as a periodic probe, is listed but is no sign of progress.

        Raises:
            DeadlineExceeded: It took longer than ``deadline_s``; the call was cancelled.
        """
        with self._listed(who, on, float("inf") if background else deadline_s):
            limit = asyncio.timeout(deadline_s)
            try:
                async with limit:
                    return await reply
            except TimeoutError:
                if not limit.expired():  # the callee's own timeout, not ours
                    raise
                raise DeadlineExceeded(who, on, deadline_s) from None

    async def local(self, who: str, *, on: str, until: Awaitable[None]) -> None:
        """Await a change of our own state under a name; the watchdog reports it when it stalls."""
        with self._listed(who, on, float("inf")):
            await until

    @property
    def healthy_until(self) -> float:
        """The latest deadline of any remote call in progress; -inf when there is none."""
        ends = (entry.deadline for entry in self._open if entry.deadline != float("inf"))
        return max(ends, default=-float("inf"))

    def oldest(self) -> str:
        """The longest wait, in a few words; empty when nobody waits."""
        first = next(iter(self._open), None)
        return "" if first is None else f"{first.who}: {first.on}"

    def waits_of(self, who: str) -> str:
        """What one pump waits for; empty when it waits for nothing."""
        return next((f"{who}: {entry.on}" for entry in self._open if entry.who == who), "")

    def describe(self, now: float) -> str:
        """The wait-for list, for a person."""
        entries = list(self._open)
        lines = [f"{e.who} waits for {e.on} for {now - e.since:.3g} s" for e in entries[:_SHOWN]]
        if more := len(entries) - _SHOWN:
            lines += [f"{more} more wait"] if more > 0 else []
        return "; ".join(lines) or "nobody waits for a remote call"

    @contextmanager
    def _listed(self, who: str, on: str, deadline_s: float) -> Generator[None, None, None]:
        now = asyncio.get_running_loop().time()
        entry = Await(who, on, now, now + deadline_s)
        self._open[entry] = None
        try:
            yield
        finally:
            del self._open[entry]
