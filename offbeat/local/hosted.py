"""Hosts a part of a run in a thread instead of a Ray process: creates, replaces and ends it."""

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Generic, TypeVar

from offbeat.local.threads import LoopThread, WorkThread
from offbeat.messages.failures import ActorLost, OffbeatError, RemoteBug, StartFailed
from offbeat.messages.text import first_line

T = TypeVar("T")
R = TypeVar("R")
ONE_AT_A_TIME: Final = threading.Lock()
"""Lock for loading models: transformers replaces torch functions meanwhile, for all threads."""


class Hosted(Generic[T]):
    """One part of a run, created in a separate thread. Any event loop may call it.

    ``restart`` abandons the part and creates another one. Open calls then raise ``ActorLost``, like
    calls of a killed process. The abandoned thread cannot be killed. It ends when its call returns.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[WorkThread], T],
        lock: AbstractContextManager[object] = ONE_AT_A_TIME,
    ) -> None:
        """Start to make the part.

        Args:
            name: Name of the part.
            make: Makes the part, in the part's thread.
            lock: Held while ``make`` runs.
        """
        self.name, self._make, self._lock = name, make, lock
        self._life = _Life(name, make, lock)

    async def call(self, during: str, work: Callable[[T], R]) -> R:
        """Call the part in its thread, after all earlier calls.

        Raises:
            StartFailed: The part could not be made.
            ActorLost: The part was replaced before the call returned.
            OffbeatError: Any typed failure of the call.
            RemoteBug: Any other error of the call.
        """
        life = self._life
        return await life.run(during, partial(life.in_thread, during, work))

    async def await_on(
        self, loop: LoopThread, during: str, work: Callable[[T], Coroutine[Any, Any, R]]
    ) -> R:
        """Await a coroutine of the part on ``loop``. Raises as ``call`` does."""
        return await loop.call(partial(self.await_here, during, work))

    def await_here(
        self, during: str, work: Callable[[T], Coroutine[Any, Any, R]]
    ) -> Coroutine[Any, Any, R]:
        """Return a coroutine that awaits ``work`` on the caller's loop, as ``await_on`` does."""
        life = self._life
        return life.run(during, partial(life.await_work, during, work))

    def restart(self) -> T | None:
        """Abandon the part and create another. Return the old one, or None if not made yet."""
        abandoned = self.end()
        self._life = _Life(self.name, self._make, self._lock)
        return abandoned

    def wait(self) -> T:
        """Wait until the part is made and return it. If ``make`` raised, raise its error."""
        return self._life.wait()

    def hosts(self, part: T) -> bool:
        """Return whether the part has been made and has not been replaced."""
        return self._life.made is part

    def end(self) -> T | None:
        """Abandon the part for good and return it, or None if it was not made yet."""
        return self._life.end()

    @contextlib.contextmanager
    def ending(self) -> Generator[None]:
        """Abandon the part after the block, which closes it. A second call does nothing."""
        try:
            with contextlib.suppress(ActorLost):
                yield
        finally:
            self.end()


class _Life(Generic[T]):
    """A part from its creation to its end."""

    def __init__(
        self, name: str, make: Callable[[WorkThread], T], lock: AbstractContextManager[object]
    ) -> None:
        self._name = name
        self._thread = WorkThread(name)
        self._made = self._thread.submit(self._make_alone, make, lock)
        self._lock = threading.Lock()
        self._is_over = False
        self._open = set[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]]()

    def _make_alone(
        self, make: Callable[[WorkThread], T], lock: AbstractContextManager[object]
    ) -> T:
        with lock:
            return make(self._thread)

    def wait(self) -> T:
        return self._made.result()

    @property
    def made(self) -> T | None:
        """Return the part, or None if it was not made yet."""
        made = self._made
        return made.result() if made.done() and made.exception() is None else None

    async def in_thread(self, during: str, work: Callable[[T], R]) -> R:
        # Submitted without waiting for the part, or a later call would overtake a waiting one.
        try:
            call = self._thread.submit(lambda: work(self._part()))
        except RuntimeError:
            raise ActorLost(self._name, during, "it was replaced") from None
        with raise_bugs_as_failures(self._name, during):
            return await asyncio.wrap_future(call)

    async def await_work(self, during: str, work: Callable[[T], Coroutine[Any, Any, R]]) -> R:
        if not self._made.done():
            await asyncio.wait((asyncio.wrap_future(self._made),))
        part = self._part()
        with raise_bugs_as_failures(self._name, during):
            return await work(part)

    def _part(self) -> T:
        if (error := self._made.exception()) is None:
            return self._made.result()
        raise StartFailed(self._name, f"{type(error).__name__}: {first_line(error)}") from error

    async def run(self, during: str, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Await ``work()``. Stop waiting if the part ends before."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work())
        with self._lock:
            if self._is_over:
                task.cancel()
            self._open.add((loop, task))
        try:
            return await task
        except asyncio.CancelledError:
            if not task.cancelled() or not self._is_over or _is_cancelled():
                raise
            raise ActorLost(self._name, during, "it was replaced") from None
        finally:
            with self._lock:
                self._open.discard((loop, task))

    def end(self) -> T | None:
        with self._lock:
            self._is_over = True
            still_open = [*self._open]
        for loop, task in still_open:
            loop.call_soon_threadsafe(task.cancel)
        self._thread.shutdown(wait=False)
        return self.made


@contextlib.contextmanager
def raise_bugs_as_failures(name: str, during: str) -> Generator[None]:
    """Raise any error except a typed failure as a bug of the part ``name``, with its location."""
    try:
        yield
    except OffbeatError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        detail = (
            f'{first_line(error)} File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        )
        raise RemoteBug(name, during, type(error).__name__, detail) from error


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
