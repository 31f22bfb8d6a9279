"""Watches the cluster's control service (GCS).

If a process cannot reach the service for 60 s, Ray ends the process without an exception. Then
nothing would report the outcome of the run. Therefore the driver polls the service, and gives up
earlier.
"""

import socket
import time
from collections.abc import Callable
from typing import Final

from offbeat.messages.failures import OffbeatError

PRIVATE_LIMIT_S: Final = 10.0  # the service of a private cluster does not restart
JOINED_LIMIT_S: Final = 40.0  # a joined cluster's service may restart; Ray's own limit is 60 s
_LOOK_S: Final = 2.0
_CONNECT_S: Final = 2.0


class GcsLost(OffbeatError):
    """The cluster's control service has stopped answering.

    Fix: start the cluster, then resume the run.
    """

    address: str
    silent_s: float
    problem: str

    def __str__(self) -> str:
        return (
            f"Ray's control service (GCS) at {self.address} has not answered for "
            f"{self.silent_s:.0f} s: {self.problem}. It was killed, it crashed, or the network "
            "to it is cut. Start the cluster again and resume from the run directory"
        )


class GcsWatch:
    """Polls the control service."""

    def __init__(
        self,
        address: str,
        limit_s: float,
        *,
        reach: Callable[[str, int], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Poll by ``reach``, which connects to a host and port or raises OSError. None: by TCP."""
        self._address, self._limit_s = address, limit_s
        self._reach, self._clock = reach or connect, clock
        self._look_at = self._answered_at = clock()
        self.answers = True
        """Whether the service answered the last poll. If not, calls to it block."""

    def check(self) -> None:
        """Raise if the service is lost.

        Raises:
            GcsLost: The service has been silent for longer than the limit.
        """
        now_s = self._clock()
        if now_s < self._look_at:
            return
        self._look_at = now_s + _LOOK_S
        host, _, port = self._address.rpartition(":")
        try:
            self._reach(host.strip("[]"), int(port))
        except OSError as problem:
            self.answers = False
            silent_s = self._clock() - self._answered_at
            if silent_s > self._limit_s:
                raise GcsLost(self._address, silent_s, str(problem)) from problem
        else:
            self.answers, self._answered_at = True, self._clock()


def connect(host: str, port: int, within_s: float = _CONNECT_S) -> None:
    """Connect by TCP once, or raise OSError if nothing listens."""
    socket.create_connection((host, port), timeout=within_s).close()
