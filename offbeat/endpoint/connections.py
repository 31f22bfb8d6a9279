"""Bounds on the connections of an endpoint: how many are open, and how long one waits for a head.

Each connection is a descriptor of the worker. aiohttp bounds the size of a head; it bounds neither
the number of connections nor the time in which a head arrives.

| a connection                   | ends                                                             |
|--------------------------------|------------------------------------------------------------------|
| has sent no request of a sample| at the deadline of its head; the oldest first, to make room      |
| is idle between two requests   | at aiohttp's keep-alive; the oldest first, where none is as above |
| is being answered              | by its answer                                                    |
| is one too many, all answered  | at once, with ``max_connections`` as the reason                  |

So a flood of silent connections takes no place from an agent, which sends its token at once, and a
sample, with ``MOST_PER_SAMPLE``, few from the others.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, cast

import msgspec

from offbeat.endpoint.errors import LimitExceeded, RequestRefused

MOST_PER_SAMPLE: Final = 128
"""Connections whose last request was for one sample: several times its open requests, for clients
that keep more than they use."""


class Connections:
    """Connections of one endpoint. All methods belong to one event loop."""

    def __init__(self, most: int, head_deadline_s: float) -> None:
        """``most``: connections of all samples, and of strangers. ``head_deadline_s``: for a head."""
        self._most, self._head_deadline_s = most, head_deadline_s
        self._refusal = _refusal(most)
        self._by_transport: dict[asyncio.BaseTransport, _Connection] = {}
        self._strangers: dict[_Connection, None] = {}  # oldest first, as the idle ones
        self._idle: dict[_Connection, None] = {}
        self._by_sample: dict[str, set[_Connection]] = {}

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._by_transport)

    def bounded(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a factory of the protocols of ``make``, whose connections are bounded."""
        return lambda: _Connection(make(), self)

    def recognise(self, transport: asyncio.BaseTransport | None, sample: str) -> None:
        """Record that a connection asks for a sample.

        Raises:
            LimitExceeded: The sample has so many others.
        """
        connection = self._by_transport.get(transport) if transport is not None else None
        if connection is None or connection.sample == sample:  # the client is gone, or known
            return
        self._leave_sample(connection)
        of_sample = self._by_sample.setdefault(sample, set())
        if len(of_sample) >= MOST_PER_SAMPLE:
            raise LimitExceeded("max_connections", MOST_PER_SAMPLE)
        connection.sample = sample
        of_sample.add(connection)

    @contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Generator[None]:
        """Keep a connection open: its head is complete, and what follows is its body."""
        connection = self._by_transport.get(transport) if transport is not None else None
        if connection is None:  # the client is gone
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
            if connection.transport in self._by_transport:
                waiting = self._strangers if connection.sample is None else self._idle
                waiting[connection] = None

    # --- events of a connection -------------------------------------------------------------------

    def opened(self, connection: "_Connection") -> bool:
        """Take a connection in, in place of another one if need be; return False if it is refused."""
        if len(self) >= self._most and not self._make_room():
            connection.transport.write(self._refusal)
            connection.transport.close()
            return False
        self._by_transport[connection.transport] = connection
        self._strangers[connection] = None
        self.start_deadline(connection)
        return True

    def start_deadline(self, connection: "_Connection") -> None:
        """Start the deadline of a head, unless it runs, or what arrives is of an accepted request."""
        if connection.deadline is None and not connection.is_answered:
            loop = asyncio.get_running_loop()
            connection.deadline = loop.call_later(self._head_deadline_s, connection.transport.abort)

    def stop_deadline(self, connection: "_Connection") -> None:
        if connection.deadline is not None:
            connection.deadline.cancel()
            connection.deadline = None

    def closed(self, connection: "_Connection") -> None:
        """Forget a connection."""
        self.stop_deadline(connection)
        self._by_transport.pop(connection.transport, None)
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        self._leave_sample(connection)

    # --- inside -----------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        stranger = next(iter(self._strangers), None)
        if stranger is not None:
            if not stranger.has_asked:
                stranger.transport.write(self._refusal)
            self._end(stranger)
            return True
        idle = next(iter(self._idle), None)
        if idle is None:
            return False
        self._end(idle)  # without a word: a client would take it for the answer of its next request
        return True

    def _end(self, connection: "_Connection") -> None:
        self.closed(connection)
        connection.transport.close()

    def _leave_sample(self, connection: "_Connection") -> None:
        if connection.sample is None:
            return
        of_sample = self._by_sample[connection.sample]
        of_sample.discard(connection)
        if not of_sample:
            del self._by_sample[connection.sample]
        connection.sample = None


class _Connection(asyncio.Protocol):
    """Forwards all events of a connection, and reports them to its endpoint's ``Connections``."""

    transport: asyncio.Transport  # once it is made

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner, self._connections = inner, connections
        self._is_open = False
        self.sample: str | None = None  # that the last accepted request was for
        self.is_answered = False
        self.has_asked = False  # one request at least
        self.deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._is_open = self._connections.opened(self)
        if self._is_open:
            self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_open and not self.transport.is_closing():
            self._connections.start_deadline(self)
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_open else None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_open:
            self._connections.closed(self)
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._is_open:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._is_open:
            self._inner.resume_writing()


def _refusal(most: int) -> bytes:
    """Return an answer to a connection that has asked nothing yet."""
    problem = (
        f"max_connections={most} connections are open here, and one that asks nothing is closed when "
        "another opens: send a request at once, and close what is not used"
    )
    refused = RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "max_connections", problem)
    body = msgspec.json.encode(refused.body)
    head = (
        f"HTTP/1.1 {refused.status.value} {refused.status.phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
