"""Work in a thread of this process, for the watchdog."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from offbeat.staging.progress import ProgressMeter, StagingProgress

T = TypeVar("T")


class ThreadJob(Generic[T]):
    """``WatchedJob`` that calls a function with a meter; its exceptions are raised by ``result``."""

    def __init__(self, call: Callable[[ProgressMeter], T], name: str) -> None:
        self._call, self._meter = call, ProgressMeter()
        self._answers = SimpleQueue[tuple[T | None, Exception | None]]()
        self._thread = threading.Thread(target=self._answer, name=name, daemon=True)
        self._thread.start()

    def result(self) -> T | None:
        try:
            value, error = self._answers.get_nowait()
        except Empty:
            return None
        if error is not None:
            raise error
        return value

    def progress(self) -> StagingProgress:
        return self._meter.now

    def abandon(self) -> None:
        """Leave the thread alone: a daemon ends with the process."""

    def join(self) -> None:
        """Return once the call has ended."""
        self._thread.join()

    def _answer(self) -> None:
        try:
            self._answers.put((self._call(self._meter), None))
        except Exception as error:  # noqa: BLE001 - not handled here: the caller raises it
            self._answers.put((None, error))
