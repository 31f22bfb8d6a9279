"""Bound on the connections of the live page, each of which has a thread.

Whoever reaches the port can open connections and send nothing, or a byte now and then. Such a
connection loses its place to the next one; one that has shown the secret keeps it.
"""

import contextlib
import threading
from socket import SHUT_RDWR, socket


class PageConnections:
    """Open connections of one server. Safe for any number of threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: dict[socket, None] = {}  # oldest first
        self._readers = set[socket]()
        self._lock = threading.Lock()

    def opened(self, connection: socket) -> bool:
        """Take a connection in, in the place of the oldest stranger if need be.

        Returns:
            False if all places are taken by readers.
        """
        with self._lock:
            if len(self._strangers) + len(self._readers) >= self._most:
                oldest = next(iter(self._strangers), None)
                if oldest is None:
                    return False
                del self._strangers[oldest]
                with contextlib.suppress(OSError):  # its other end has closed it
                    oldest.shutdown(SHUT_RDWR)  # wakes its thread, which closes it
            self._strangers[connection] = None
            return True

    def recognised(self, connection: socket) -> None:
        """Record that a connection has shown the secret, unless it has lost its place."""
        with self._lock:
            if connection in self._strangers:
                del self._strangers[connection]
                self._readers.add(connection)

    def closed(self, connection: socket) -> None:
        """Forget a connection, before its socket is closed."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._readers.discard(connection)
