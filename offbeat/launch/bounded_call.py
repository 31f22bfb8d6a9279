"""A deadline for calls that have no timeout of their own."""

import os
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from offbeat.messages.failures import DeadlineExceeded

T = TypeVar("T")


class StartedCall(threading.Thread, Generic[T]):
    """A call that runs in a thread as soon as this object is created."""

    def __init__(self, call: Callable[[], T], what: str) -> None:
        """Start the call. ``what`` names it in messages."""
        super().__init__(name=what, daemon=True)
        self.is_abandoned = False  # whether the process may end before the call does
        self._call = call
        self._answers = SimpleQueue[tuple[T | None, Exception | None]]()
        self.start()

    def run(self) -> None:
        try:
            self._answers.put((self._call(), None))
        except Exception as error:  # noqa: BLE001 - not handled here: the caller raises it
            self._answers.put((None, error))

    def result(self, within_s: float | None = None) -> T:
        """Wait for the result, only once. If the call takes too long, abandon it.

        Raises:
            DeadlineExceeded: It has not returned within ``within_s``.
            Exception: The exception of the call.
        """
        try:
            value, error = self._answers.get(timeout=within_s)
        except Empty:
            self.is_abandoned = True
            raise DeadlineExceeded("driver", self.name, within_s or 0.0) from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # there is one, if no error


def run_bounded(call: Callable[[], T], what: str, within_s: float) -> T:
    """Run a call in a thread and return its result. If the call takes too long, abandon it.

    Raises:
        DeadlineExceeded: It has not returned within ``within_s``.
        Exception: The exception of ``call``.
    """
    return StartedCall(call, what).result(within_s)


def exit_behind_blocked_calls(code: int) -> None:
    """End the process with this exit code if an abandoned call still blocks, else return.

    Without this, a call inside a library could return during the interpreter's shutdown and crash
    it.
    """
    if any(isinstance(each, StartedCall) and each.is_abandoned for each in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
