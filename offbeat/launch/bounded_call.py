"""A deadline for calls that have none of their own."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from offbeat.messages.failures import DeadlineExceeded

T = TypeVar("T")


def bounded(call: Callable[[], T], what: str, within_s: float) -> T:
    """Return what ``call`` returns, in a thread; one that blocks is left behind.

    Raises:
        DeadlineExceeded: It has not returned within ``within_s``.
        Exception: What ``call`` raised.
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
