"""Threads that host the parts of a run: one runs an event loop, one runs calls in their order.

Both are daemon threads: Python cannot kill a thread, so one that hangs is abandoned, and the process
still ends.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from offbeat.environments.exits import run_past_exits

T = TypeVar("T")
P = ParamSpec("P")


class CpuClocks:
    """CPU seconds of the threads that report their own time; the rest is the controller's."""

    def __init__(self, process_s: Callable[[], float] = time.process_time) -> None:
        """``process_s`` returns the CPU seconds of the whole process."""
        self._process_s = process_s
        self._threads = list[Callable[[], float]]()
        self._lock = threading.Lock()

    def clock_of(self, thread: threading.Thread) -> Callable[[], float]:
        """Return a clock of a running thread's CPU seconds, which may be read in any thread.

        It stands still once the thread has ended.
        """
        identity = thread.ident
        if identity is None:
            raise RuntimeError(f"thread {thread.name} has not started")
        if not hasattr(time, "pthread_getcpuclockid"):  # macOS: its time counts as the controller's
            return lambda: 0.0
        clock_id, last_s = time.pthread_getcpuclockid(identity), 0.0

        def read() -> float:
            nonlocal last_s
            with contextlib.suppress(OSError):  # the thread has ended
                last_s = time.clock_gettime(clock_id)
            return last_s

        with self._lock:
            self._threads.append(read)
        return read

    def rest_s(self) -> float:
        """Return the CPU seconds of the process without those of the threads that have a clock."""
        with self._lock:
            hosted_s = sum(read() for read in self._threads)
        return self._process_s() - hosted_s


class LoopThread:
    """A thread that runs an event loop until ``stop``, also past ``sys.exit()`` of user code."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            run_past_exits(runner.get_loop(), self._wait())

    async def _wait(self) -> None:
        await self._is_over.wait()

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on this loop; a caller that is cancelled cancels it."""
        if asyncio.get_running_loop() is self.loop:
            return await work()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self.loop))

    def stop(self) -> None:
        """End the loop and the thread; calls that are still open are cancelled."""
        self.loop.call_soon_threadsafe(self._is_over.set)


class WorkThread(Executor):
    """Executor of one daemon thread, which runs calls in the order in which they are submitted.

    A ``ThreadPoolExecutor`` would hold up the end of the process until its thread has returned.
    """

    def __init__(self, name: str) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._is_shut_down = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def submit(  # pyright: ignore[reportIncompatibleMethodOverride] -- typeshed hides the first two
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> "Future[T]":
        """Run a call once all earlier ones have ended, unless its future is cancelled before.

        Raises:
            RuntimeError: The executor was shut down.
        """
        if self._is_shut_down:
            raise RuntimeError(f"thread {self.thread.name} was shut down")
        future = Future[T]()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 -- whoever awaits the future handles it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 -- signature of Executor
        """Refuse further calls; the thread ends once it has run the calls in its queue."""
        del cancel_futures
        self._is_shut_down = True
        self._calls.put(None)
        if wait:
            self.thread.join()
