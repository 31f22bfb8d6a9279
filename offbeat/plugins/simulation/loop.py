"""Event loop on virtual time that draws every choice from a seed.

    the clock             jumps to the next timer when nothing is ready
    the next callback     any that is ready, drawn from ``rng``
    first steps of tasks  in the order in which their process created them

asyncio guarantees this order of first steps, and code may rely on it. It does not guarantee the
order of other callbacks that are ready at the same moment. The same seed gives the same run, bit
for bit.
"""

import asyncio
import heapq
import inspect
import random
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from types import CoroutineType
from typing import Any, Final, TypeVar, cast

from offbeat.messages.failures import OffbeatError
from offbeat.plugins.simulation.processes import OUTSIDE, PROCESS, Entry, Process

T = TypeVar("T")
_CLOSE_TRIES: Final = 50  # a coroutine that awaits in its clean-up is closed again


class Deadlock(OffbeatError):
    """No callback can ever run again.

    Fix: none: only in the simulator (docs/simulator.md).
    """

    at_s: float
    waits: str

    def __str__(self) -> str:
        return (
            f"deadlock at {self.at_s:g} s: no callback is ready and no timer is set; {self.waits}"
        )


class OutOfBounds(OffbeatError):
    """An episode ran for longer than allowed.

    Fix: none: only in the simulator (docs/simulator.md).
    """

    at_s: float
    events: int
    waits: str

    def __str__(self) -> str:
        return f"not over after {self.at_s:g} s and {self.events} events; {self.waits}"


class NumberedTask(asyncio.Task[T]):
    """Task that hashes by order of creation, so that sets of tasks iterate alike in every run."""

    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks of simulated processes until a future is done, then closes all others."""

    def __init__(self, rng: random.Random, *, max_events: int, max_s: float) -> None:
        self._random = rng.random
        self._now = 0.0
        self._ready: list[Entry | Process] = []  # a process represents its next starting task
        self._timers: list[tuple[float, int, Entry]] = []
        self._count = 0  # breaks ties between timers
        self._tasks: list[NumberedTask[Any]] = []
        self._creating: Process | None = None
        self._max_events, self._max_s = max_events, max_s
        self._running = self._closed = False
        self.events = 0  # callbacks run

    # --- asyncio's interface ---------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[T]":
        if self._closed:
            cast("Coroutine[Any, Any, T]", coro).close()
            raise RuntimeError("the episode is over")
        task = cast("NumberedTask[T]", NumberedTask.__new__(NumberedTask))
        task.number = len(self._tasks)
        self._creating = PROCESS.get(OUTSIDE) if context is None else context.get(PROCESS, OUTSIDE)
        # Tasks always have names, because asyncio's own counter is global.
        task.__init__(coro, loop=self, name=name or "task", context=context)
        self._tasks.append(task)
        return task

    def call_soon(  # type: ignore[override] - an Entry does what a Handle does
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> Entry:
        if context is None:
            context = copy_context()
        process = context.get(PROCESS, OUTSIDE)
        entry = Entry(callback, args, context, process, self._now)
        if self._creating is None:
            self._ready.append(entry)
        else:
            process = self._creating
            self._creating = None
            process.starting.append(entry)
            self._ready.append(process)
        return entry

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> Entry:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> Entry:
        if context is None:
            context = copy_context()
        entry = Entry(callback, args, context, context.get(PROCESS, OUTSIDE), when)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, entry))
        return entry

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignore errors of tasks that are not awaited, or that are discarded."""

    # --- processes -------------------------------------------------------------------------------

    def at(
        self, when_s: float, process: Process, callback: Callable[..., object], *args: object
    ) -> Entry:
        """Run ``callback`` inside ``process`` at a time, unless the process is dead by then."""
        entry = Entry(callback, args, process.context, process, when_s)
        self._count += 1
        heapq.heappush(self._timers, (when_s, self._count, entry))
        return entry

    def run_in(
        self, delay_s: float, process: Process, callback: Callable[..., object], *args: object
    ) -> Entry:
        """Run ``callback`` inside ``process`` after a time, unless the process is dead by then."""
        return self.at(self._now + delay_s, process, callback, *args)

    def kill(self, process: Process) -> None:
        process.alive, process.frozen = False, False
        process.parked.clear()
        process.starting.clear()

    def freeze(self, process: Process) -> None:
        process.frozen = process.alive

    def thaw(self, process: Process) -> None:
        """Make all callbacks ready that came due while the process was frozen."""
        if process.frozen:
            process.frozen = False
            self._ready += process.parked
            process.parked.clear()

    # --- running ---------------------------------------------------------------------------------

    def run_until_complete(self, future: "asyncio.Future[T]") -> T:  # type: ignore[override]
        """Run until ``future`` is done and return its result.

        Raises:
            Deadlock: It can never be done.
            OutOfBounds: It is not done within an episode's limits on events and time.
        """
        self._running = True
        asyncio._set_running_loop(self)  # noqa: SLF001 - public, for authors of event loops
        try:
            self._run_ready()
            while not future.done():
                self._jump()
                self._run_ready()
        finally:
            self._running = False
            asyncio._set_running_loop(None)  # noqa: SLF001
        return future.result()

    def _run_ready(self) -> None:
        """Run all callbacks that are ready now, and the ones that they make ready."""
        ready, draw, count = self._ready, self._random, 0
        while left := len(ready):
            if left == 1:
                entry = ready.pop()
            else:
                chosen = int(draw() * left)
                entry = ready[chosen]
                ready[chosen] = ready[-1]
                ready.pop()
            if isinstance(entry, Process):
                if entry.frozen:
                    entry.parked.append(entry)
                    continue
                if not entry.starting:
                    continue  # the process died before the task's first step
                entry = entry.starting.popleft()
            process, callback = entry.process, entry.callback
            if callback is None or not process.alive:
                continue
            if process.frozen:
                process.parked.append(entry)
                continue
            count += 1
            entry.context.run(callback, *entry.args)
            if count > self._max_events:
                break
        self.events += count
        if self.events > self._max_events or self._now > self._max_s:
            raise OutOfBounds(self._now, self.events, self._unfinished())

    def _jump(self) -> None:
        """Move the clock to the next timer. Everything due then becomes ready."""
        timers, ready, pop = self._timers, self._ready, heapq.heappop
        while timers:
            when, _, entry = pop(timers)
            if entry.callback is None or not entry.process.alive:
                continue
            if when > self._now:  # noqa: PLR1730 - a call of max for each jump
                self._now = when
            ready.append(entry)
            while timers and timers[0][0] <= self._now:
                ready.append(pop(timers)[2])
            return
        raise Deadlock(self._now, self._unfinished())

    def _unfinished(self) -> str:
        names = [task.get_name() for task in self._tasks if not task.done()]
        return f"unfinished tasks: {', '.join(names[:8]) or 'none'}"

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Dispose of all coroutines that will never run again, without errors."""
        self._closed = True
        asyncio._set_running_loop(self)  # noqa: SLF001 - clean-up code may ask for it
        try:
            for task in self._tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001
                    _dispose(cast("CoroutineType[Any, Any, Any]", task.get_coro()))
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()


def _dispose(coroutine: "CoroutineType[Any, Any, Any]") -> None:
    """Close a coroutine of a dead process, regardless of its clean-up.

    The awaited coroutine is closed first, because an outer one may catch errors of closing an inner
    one.
    """
    chain, inner = [coroutine], coroutine.cr_await
    while inspect.iscoroutine(inner):
        chain.append(inner)
        inner = inner.cr_await
    for each in reversed(chain):
        for _ in range(_CLOSE_TRIES):
            try:
                each.close()
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001, S112 - a task group raises what closes it, in a group
                continue
            break
