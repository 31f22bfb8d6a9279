"""Heartbeat timeout of the controller, in the driver."""

import time
from collections.abc import Callable
from typing import Final

from offbeat.messages.failures import DeadlineExceeded

# A controller that has replied before and is silent this long counts as frozen
_SILENT_S: Final = 60.0
_FIRST_ANSWER_S: Final = 300.0  # its process has to start and to import everything


class HeartbeatTimeout:
    """Tracks how long a controller has been silent, and whether that is too long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the timer: the controller was started now."""
        self._clock = clock
        self._since, self._limit_s = clock(), _FIRST_ANSWER_S

    def broken(self) -> None:
        """Restart the timer: the controller replied."""
        self._since, self._limit_s = self._clock(), _SILENT_S

    def check(self) -> None:
        """Raise if the controller is silent for too long.

        Raises:
            DeadlineExceeded: It counts as frozen.
        """
        if self._clock() > self._since + self._limit_s:
            raise DeadlineExceeded("driver", "the controller's status", self._limit_s)
