"""Keeps every remote call in progress with its waiter, its name and its deadline."""

import asyncio
import enum
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import msgspec

from offbeat.messages.failures import ActorLost, Component, DeadlineExceeded
from offbeat.telemetry.status_file import NamedWait

T = TypeVar("T")
_SHOWN: Final = 6
_NEVER: Final = float("inf")


class Pump(enum.StrEnum):
    """Endless task of the controller that waits for a change of its state."""

    ROLLOUT = "rollout pump"
    TRAIN = "train pump"
    SYNC = "sync pump"
    EVALUATION = "evaluation pump"


class PendingWait(msgspec.Struct, eq=False):  # made for each call: a third of a dataclass's cost
    """One wait in progress. Times are seconds on the event loop's clock."""

    waiter: str
    target: str
    since: float
    deadline: float  # inf for a wait on run state: the watchdog judges it
    pump: Pump | None = None  # pump that waits on run state
    component: Component | None = None  # what a remote call waits for
    engine: str = ""  # that has to live for the reply; empty: none has to
    background: bool = False  # it unblocks nobody: a probe of an engine that is well
    task: "asyncio.Task[Any] | None" = None  # task that waits
    expired: bool = False  # cancelled by ``end``
    lost: str = ""  # why the callee was given up; empty: the deadline is over

    def end(self, lost: str = "") -> None:
        """Cancel the waiting task once. The task finds the reason in this wait."""
        if self.expired:
            return
        self.expired, self.lost = True, lost
        if self.task is not None:
            self.task.cancel()

    def error(self, deadline_s: float) -> ActorLost | DeadlineExceeded:
        """Return the error of an ended call."""
        if self.lost:
            return ActorLost(self.engine, self.waiter, self.lost)
        return DeadlineExceeded(self.waiter, self.target, deadline_s, self.component)


class PendingWaits:
    """The waits in progress, oldest first.

    Calls with the same time limit reach their deadlines in the order in which they began. So one
    timer per time limit is enough for any number of open calls.
    """

    def __init__(self) -> None:
        self._open: dict[PendingWait, None] = {}
        self._due: dict[float, dict[PendingWait, None]] = {}  # calls by their time to reply

    async def call(
        self,
        waiter: str,
        *,
        target: str,
        component: Component,
        deadline_s: float,
        reply: Awaitable[T],
        background: bool = False,
        engine: str = "",
    ) -> T:
        """Await a reply of ``component``. List the wait under the component's name.

        A ``background`` call, such as a periodic probe, is listed but is not a sign of progress.

        Raises:
            DeadlineExceeded: The reply came after ``deadline_s``, and the call was cancelled.
            ActorLost: The ``engine`` that the reply needs was given up, and the call was cancelled.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        now = loop.time()
        entry = PendingWait(
            waiter,
            target,
            now,
            now + deadline_s,
            None,
            component,
            engine,
            background=background,
            task=task,
        )
        already = 0 if task is None else task.cancelling()
        due = self._due.get(deadline_s)
        if due is None:
            due = self._due[deadline_s] = {}
            loop.call_at(entry.deadline, self._end_late, deadline_s)
        due[entry] = self._open[entry] = None
        try:
            answer = await reply
        except asyncio.CancelledError:
            # Ours, unless another task has cancelled too. Like asyncio.timeout, at half its cost.
            if entry.expired and task is not None and task.uncancel() <= already:
                raise entry.error(deadline_s) from None
            raise
        except Exception as error:
            # The call that we cancelled failed in its clean-up. It is late all the same. A cancel
            # that stayed counted would look like another task's.
            if entry.expired and task is not None and task.uncancel() <= already:
                raise entry.error(deadline_s) from error
            raise
        else:
            if entry.expired and task is not None:
                task.uncancel()
            return answer
        finally:
            del self._open[entry]
            due.pop(entry, None)

    def _end_late(self, deadline_s: float) -> None:
        """End the late calls with this time limit. Check again when the next one is due."""
        due, loop = self._due[deadline_s], asyncio.get_running_loop()
        while (first := next(iter(due), None)) is not None:
            if first.deadline > loop.time():
                loop.call_at(first.deadline, self._end_late, deadline_s)
                return
            del due[first]
            first.end()
        del self._due[deadline_s]

    def give_up(self, engine: str, reason: str) -> None:
        """End the calls that need this engine with ``ActorLost``.

        Ray reports a lost machine after a minute, and a broken network connection perhaps never.
        """
        for entry in self._open:
            if entry.engine == engine:
                entry.end(reason)

    async def local(
        self, waiter: str, *, target: str, until: Awaitable[T], pump: Pump | None = None
    ) -> T:
        """Await a change of run state under a name. The watchdog reports a wait that stalls."""
        return await self._await_listed(waiter, target, _NEVER, until, pump)

    async def pause(self, waiter: str, *, target: str, for_s: float) -> None:
        """Wait for a back-off. The watchdog waits until it is over, too."""
        await self._await_listed(waiter, target, for_s, asyncio.sleep(for_s))

    async def _await_listed(
        self,
        waiter: str,
        target: str,
        for_s: float,
        until: Awaitable[T],
        pump: Pump | None = None,
    ) -> T:
        now = asyncio.get_running_loop().time()
        entry = PendingWait(waiter, target, now, now + for_s, pump)
        self._open[entry] = None
        try:
            return await until
        finally:
            del self._open[entry]

    @property
    def healthy_until(self) -> float:
        """Return the latest deadline of a remote call or back-off in progress, else -inf."""
        ends = (
            entry.deadline
            for entry in self._open
            if entry.deadline != _NEVER and not entry.background
        )
        return max(ends, default=-_NEVER)

    def oldest(self, component: Component | None = None) -> str:
        """Describe the longest wait for another party in a few words, or return "" without one.

        With ``component``, consider only waits for a reply of this component.
        """
        remote = (entry for entry in self._open if entry.deadline != _NEVER)
        wanted = (entry for entry in remote if component in (None, entry.component))
        first = next((entry for entry in wanted if not entry.background), None)
        return "" if first is None else f"{first.target} ({first.waiter})"

    def describe_wait(self, pump: Pump) -> str:
        """Describe the wait of one pump, or return "" if it waits for nothing."""
        return next(
            (f"{each.target} ({each.waiter})" for each in self._open if each.pump is pump), ""
        )

    def list_longest(self, now: float) -> tuple[NamedWait, ...]:
        """Return the longest waits in progress, without probes of healthy engines."""
        entries = [entry for entry in self._open if not entry.background][:_SHOWN]
        return tuple(
            NamedWait(
                each.waiter,
                each.target,
                now - each.since,
                None if each.deadline == _NEVER else each.deadline - each.since,
            )
            for each in entries
        )

    def describe(self, now: float) -> str:
        """Describe all waits in progress, for a person."""
        entries = [entry for entry in self._open if not entry.background]
        lines = [
            f"{e.waiter} waits for {e.target} for {now - e.since:.3g} s" for e in entries[:_SHOWN]
        ]
        if (more := len(entries) - _SHOWN) > 0:
            lines += [f"{more} more wait"]
        return "; ".join(lines) or "nobody waits for a remote call"


def is_cancelled() -> bool:
    """Return whether the running task was cancelled, no matter how its call reacted."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
