"""Bound on the connections of the live page, each of which has a thread.

Whoever reaches the port can open connections and send nothing, or a byte now and then. Such a
connection is closed in favour of the next one; one that has shown the secret is kept.
"""

import contextlib
import threading
from socket import SHUT_RDWR, socket


class PageConnections:
    """Open connections of one server. Safe for any number of threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._unauthenticated: dict[socket, None] = {}  # oldest first
        self._authenticated = set[socket]()
        self._lock = threading.Lock()

    def opened(self, connection: socket) -> bool:
        """Accept a connection, and close the oldest unauthenticated one if there are too many.

        Returns:
            False if all connections are authenticated, and there is no room for another.
        """
        with self._lock:
            if len(self._unauthenticated) + len(self._authenticated) >= self._most:
                oldest = next(iter(self._unauthenticated), None)
                if oldest is None:
                    return False
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):  # its other end has closed it
                    oldest.shutdown(SHUT_RDWR)  # wakes its thread, which closes it
            self._unauthenticated[connection] = None
            return True

    def mark_authenticated(self, connection: socket) -> None:
        """Record that a connection has shown the secret, unless it has been closed for another."""
        with self._lock:
            if connection in self._unauthenticated:
                del self._unauthenticated[connection]
                self._authenticated.add(connection)

    def closed(self, connection: socket) -> None:
        """Forget a connection, before its socket is closed."""
        with self._lock:
            self._unauthenticated.pop(connection, None)
            self._authenticated.discard(connection)
