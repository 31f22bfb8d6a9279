"""Bounds an endpoint's connections: how many are open, and how long each may wait for a head.

Each connection is a file descriptor of the worker. A *head* is the request line with the headers.
aiohttp bounds the size of a head, but neither the number of connections nor the time in which a
head arrives.

| a connection                    | ends                                                           |
|---------------------------------|----------------------------------------------------------------|
| has sent no request of a sample | at the deadline of its head, or earlier to make room: oldest   |
|                                 | first                                                          |
| is idle between two requests    | at aiohttp's keep-alive, or earlier to make room: oldest       |
|                                 | first, after all without a request                             |
| is being answered               | with its answer                                                |
| is one too many, while all      | at once, with ``max_connections`` as the reason                |
| others are being answered       |                                                                |

So a flood of silent connections never displaces an agent, which sends its token at once. A sample
displaces few connections of the others, because of ``MOST_PER_SAMPLE``.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, cast

import msgspec
from aiohttp import web

from offbeat.plugins.agents.endpoint.errors import LimitExceeded, RequestRefused
from offbeat.plugins.agents.endpoint.http import HttpHandler

MOST_PER_SAMPLE: Final = 128
"""Maximum number of connections whose last request was for the same sample. It is several times the
maximum of open requests, because clients keep unused connections.
"""


class Connections:
    """Connections of one endpoint. All methods belong to one event loop."""

    def __init__(self, most: int, head_deadline_s: float) -> None:
        """``most`` bounds all connections. ``head_deadline_s`` bounds the wait for a head."""
        self._most, self._head_deadline_s = most, head_deadline_s
        self._refusal = _refusal(most)
        self._open = set[Connection]()
        self._strangers: dict[Connection, None] = {}  # oldest first, like the idle ones
        self._idle: dict[Connection, None] = {}
        self._by_sample: dict[str, set[Connection]] = {}

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def recognise(self, request: web.Request, sample: str) -> None:
        """Record that the connection of a request belongs to a sample.

        Raises:
            LimitExceeded: The sample has too many other connections.
        """
        connection = cast("Connection", request.protocol)
        if connection not in self._open or connection.sample == sample:  # closed, or known
            return
        self._leave_sample(connection)
        of_sample = self._by_sample.setdefault(sample, set())
        if len(of_sample) >= MOST_PER_SAMPLE:
            raise LimitExceeded("max_connections", MOST_PER_SAMPLE)
        connection.sample = sample
        of_sample.add(connection)

    @contextmanager
    def answering(self, request: web.Request) -> Generator[None]:
        """Keep the connection of a request open: its head is complete, its body follows."""
        connection = cast("Connection", request.protocol)
        if connection not in self._open:  # the client has disconnected
            yield
            return
        self.stop_deadline(connection)
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        connection.is_answered = connection.has_asked = True
        try:
            yield
        finally:
            connection.is_answered = False
            if connection in self._open:
                waiting = self._strangers if connection.sample is None else self._idle
                waiting[connection] = None

    # --- events of a connection -------------------------------------------------------------------

    def admit(self, connection: "Connection", transport: asyncio.Transport) -> bool:
        """Add a connection, and close another if necessary; return False if it is refused."""
        if len(self) >= self._most and not self._make_room():
            transport.write(self._refusal)
            transport.close()
            return False
        self._open.add(connection)
        self._strangers[connection] = None
        self.start_deadline(connection, transport)
        return True

    def start_deadline(self, connection: "Connection", transport: asyncio.Transport) -> None:
        """Start the deadline of a head, unless it runs or the data is from an accepted request."""
        if connection.deadline is None and not connection.is_answered:
            loop = asyncio.get_running_loop()
            connection.deadline = loop.call_later(self._head_deadline_s, transport.abort)

    def stop_deadline(self, connection: "Connection") -> None:
        if connection.deadline is not None:
            connection.deadline.cancel()
            connection.deadline = None

    def closed(self, connection: "Connection") -> None:
        """Forget a connection."""
        self.stop_deadline(connection)
        self._open.discard(connection)
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        self._leave_sample(connection)

    # --- inside -----------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        stranger = next(iter(self._strangers), None)
        if stranger is not None:
            self._end(stranger, b"" if stranger.has_asked else self._refusal)
            return True
        idle = next(iter(self._idle), None)
        if idle is None:
            return False
        self._end(idle)  # without an answer: a client would match it to its next request
        return True

    def _end(self, connection: "Connection", last: bytes = b"") -> None:
        self.closed(connection)
        if connection.transport is not None:
            connection.transport.write(last)
            connection.transport.close()

    def _leave_sample(self, connection: "Connection") -> None:
        if connection.sample is None:
            return
        of_sample = self._by_sample[connection.sample]
        of_sample.discard(connection)
        if not of_sample:
            del self._by_sample[connection.sample]
        connection.sample = None


class Connection(HttpHandler):
    """One connection. Its events are first reported to its endpoint's ``Connections``."""

    def __init__(
        self, manager: web.Server, loop: asyncio.AbstractEventLoop, connections: Connections
    ) -> None:
        super().__init__(manager, loop)
        self._connections = connections
        self.sample: str | None = None  # sample of the last accepted request
        self.is_answered = False
        self.has_asked = False  # at least one request
        self.deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._connections.admit(self, cast("asyncio.Transport", transport)):
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self._connections.start_deadline(self, self.transport)
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        # Also without a transport: aiohttp drops it when it closes the connection itself.
        self._connections.closed(self)
        super().connection_lost(exc)


def _refusal(most: int) -> bytes:
    """Return the refusal for a connection without a request."""
    problem = (
        f"max_connections={most} connections are open, so an idle one is closed when another "
        "opens: send requests at once, and close unused connections"
    )
    refused = RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "max_connections", problem)
    body = msgspec.json.encode(refused.body)
    head = (
        f"HTTP/1.1 {refused.status.value} {refused.status.phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
