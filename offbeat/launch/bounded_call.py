"""A deadline for calls that have none of their own."""

import os
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from offbeat.messages.failures import DeadlineExceeded

T = TypeVar("T")


class _Call(threading.Thread):
    """Thread of one call."""

    is_abandoned = False


def bounded(call: Callable[[], T], what: str, within_s: float) -> T:
    """Call in a thread and return the result; a call that blocks is abandoned.

    Raises:
        DeadlineExceeded: It has not returned within ``within_s``.
        Exception: The exception of ``call``.
    """
    answers = SimpleQueue[tuple[T | None, Exception | None]]()

    def answer() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:  # noqa: BLE001 - not handled here: the caller raises it
            answers.put((None, error))

    thread = _Call(target=answer, name=what, daemon=True)
    thread.start()
    try:
        value, error = answers.get(timeout=within_s)
    except Empty:
        thread.is_abandoned = True
        raise DeadlineExceeded("driver", what, within_s) from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # there is one, if no error


def exit_behind_blocked_calls(code: int) -> None:
    """End the process with this exit code if an abandoned call still blocks; else return.

    A call inside a library crashes the interpreter if it returns while that is being shut down.
    """
    if any(isinstance(each, _Call) and each.is_abandoned for each in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
