"""Keeps an event loop alive that runs user code: ``sys.exit()`` fails one call, not the loop.

asyncio re-raises ``SystemExit`` and ``KeyboardInterrupt`` of a task or a callback in the thread
that runs the loop. In an actor, that thread would then end silently, and the process would stay
alive without answering calls.
"""

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Coroutine, Generator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Final, TypeVar

from offbeat.config.user_code import describe
from offbeat.messages.failures import OffbeatError

T = TypeVar("T")
LOOP_ENDED: Final = 70
"""Exit code of a process whose event loop was ended by a callback."""


class ExitRaised(OffbeatError):
    """User code raised an exception that would have ended its process, such as ``SystemExit``.

    Fix: raise an ``Exception`` instead of ``sys.exit()`` or a ``BaseException``.
    """

    raised: str

    def __str__(self) -> str:
        return f"user code raised {self.raised}; raise an Exception instead, or return"


@contextmanager
def exits_as_errors() -> Generator[None]:
    """Raise ``ExitRaised`` if the block raises anything but an ``Exception``.

    Cancellation and closing pass through, because they come from outside the block.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise ExitRaised(describe(error)) from error


class ContainedCoroutine(Coroutine[Any, Any, T]):
    """A coroutine that raises ``ExitRaised`` if the wrapped coroutine raises an exit."""

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self._inner = inner
        self.__name__ = getattr(inner, "__name__", type(inner).__name__)
        self.__qualname__ = getattr(inner, "__qualname__", self.__name__)

    def send(self, value: Any, /) -> Any:  # noqa: ANN401 - whatever the coroutine yields
        with self._executing():
            return self._inner.send(value)

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> Any:  # noqa: ANN401 - as above
        del val, tb  # asyncio throws instances
        with self._executing():
            return self._inner.throw(typ)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._inner.__await__()

    def _executing(self) -> AbstractContextManager[None]:
        """Return the context in which the wrapped coroutine executes, up to its next await."""
        return exits_as_errors()


def contain_exits() -> None:
    """Make the running event loop survive exits of tasks. If a callback exits, end the process.

    A task that raises ``SystemExit``, ``KeyboardInterrupt`` or another ``BaseException`` fails with
    ``ExitRaised`` instead. A callback (``call_later``) cannot be contained: it ends the process
    with code ``LOOP_ENDED`` and a log line, so that callers notice the loss.
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is not _make_contained_task:
        loop.set_task_factory(_make_contained_task)
        _end_with_thread(threading.current_thread())


def run_past_exits(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, object]) -> None:
    """Run the loop until ``main`` has ended, in a thread that lives as long as the process.

    Exits of tasks are contained as in ``contain_exits``. If a callback raises an exit, the exit is
    logged and the loop continues.
    """
    loop.set_task_factory(_make_contained_task)
    task = loop.create_task(main)
    while not task.done():
        try:
            loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            _log_critical("event_loop.continued", describe(error))


def _make_contained_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Any,  # noqa: ANN401 - a coroutine, or what a generator makes of one
    **options: Any,  # noqa: ANN401 - those of asyncio
) -> "asyncio.Task[Any]":
    return asyncio.Task(ContainedCoroutine(coroutine), loop=loop, **options)


def _end_with_thread(thread: threading.Thread) -> None:
    # A later thread may have the same identifier
    before, watched = threading.excepthook, weakref.ref(thread)

    def hook(ended: threading.ExceptHookArgs) -> None:
        before(ended)  # does not report SystemExit
        if ended.thread is not None and ended.thread is watched():
            raised = describe(ended.exc_value) if ended.exc_value else ended.exc_type.__name__
            _log_critical("event_loop.ended", raised)
            logging.shutdown()  # flush the handlers before the exit
            os._exit(LOOP_ENDED)

    threading.excepthook = hook


def _log_critical(event: str, raised: str) -> None:
    # The import lasts as long as the rest of an agent process's start
    import structlog  # noqa: PLC0415 -- see above

    structlog.stdlib.get_logger(__name__).critical(event, by=raised)
