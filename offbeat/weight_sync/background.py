"""Runs blocking work in daemon threads, which do not keep the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start work in a daemon thread; the future has its result or its error."""
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
