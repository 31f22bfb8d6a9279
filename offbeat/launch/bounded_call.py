"""A deadline for calls that have none of their own."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from offbeat.messages.failures import DeadlineExceeded

T = TypeVar("T")


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

    threading.Thread(target=answer, name=what, daemon=True).start()
    try:
        value, error = answers.get(timeout=within_s)
    except Empty:
        raise DeadlineExceeded("driver", what, within_s) from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # there is one, if no error
