"""Measures how long the driver waits for an answer of the controller."""

import time
from collections.abc import Callable
from typing import Final

from offbeat.messages.failures import DeadlineExceeded

_SILENT_S: Final = 60.0  # one that has answered, and then nothing for so long, is frozen
_FIRST_ANSWER_S: Final = 300.0  # its process has to start and to import everything


class HeartbeatTimeout:
    """Tracks since when a controller has answered nothing, and whether that is too long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count: the controller was started now."""
        self._clock = clock
        self._since, self._limit_s = clock(), _FIRST_ANSWER_S

    def broken(self) -> None:
        """Begin to count again: the controller answered."""
        self._since, self._limit_s = self._clock(), _SILENT_S

    def check(self) -> None:
        """Pass while it may still answer.

        Raises:
            DeadlineExceeded: It is taken for frozen.
        """
        if self._clock() > self._since + self._limit_s:
            raise DeadlineExceeded("driver", "the controller's status", self._limit_s)
