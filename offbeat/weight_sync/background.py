"""Runs blocking work in daemon threads, which do not keep the process alive."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start work in a daemon thread and return a future of its result or error."""
    outcome = Future[T]()
    outcome.set_running_or_notify_cancel()  # nobody can cancel it from here on

    def run() -> None:
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 -- raised where the result is awaited
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


async def in_thread(name: str, work: Callable[[], T]) -> T:
    """Run blocking work in a daemon thread and return its result.

    If the caller is cancelled, the work still runs to its end and its result is discarded.
    """
    return await asyncio.wrap_future(start_in_thread(work, name))
