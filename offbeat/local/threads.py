"""Threads that host the parts of a run: one runs an event loop, one runs calls in order.

Both are daemon threads, because Python cannot kill a thread. A thread that hangs is abandoned, and
the process still ends.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from offbeat.environments.exits import run_past_exits

T = TypeVar("T")
P = ParamSpec("P")


class LoopThread:
    """A thread that runs an event loop until ``stop``, even if user code calls ``sys.exit()``."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            run_past_exits(runner.get_loop(), self._is_over.wait())

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on this loop. A cancelled caller cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self.loop))

    def stop(self, within_s: float = 0.0) -> None:
        """Cancel open calls, end the loop and its thread, and wait for that."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._is_over.set)
        self.thread.join(within_s)


class WorkThread(Executor):
    """Executor with one daemon thread, which runs calls in the order in which they are submitted.

    A ``ThreadPoolExecutor`` would delay the end of the process until its thread has returned.
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
        """Run a call once all earlier calls have ended, unless its future is cancelled before.

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
        """Refuse further calls. The thread ends once it has run the calls in its queue."""
        del cancel_futures
        self._is_shut_down = True
        self._calls.put(None)
        if wait:
            self.thread.join()
