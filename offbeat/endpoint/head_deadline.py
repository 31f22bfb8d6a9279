"""Deadline for the head of a request. aiohttp bounds its size and the wait between two requests.

A connection whose client begins a head and never ends it, or sends nothing at all, would otherwise
stay open for as long as the process lives, and its descriptor with it.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast


class HeadDeadline:
    """Connections that wait for the head of a request; each is aborted at its deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        self._answering = set[asyncio.BaseTransport]()

    def bounded(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a factory of the protocols of ``make``, whose connections have the deadline."""
        return lambda: _Connection(make(), self)

    def begin(self, transport: asyncio.BaseTransport) -> None:
        """Start the deadline, unless it runs already, or what arrives is of an accepted request."""
        if transport in self._waiting or transport in self._answering:
            return
        loop = asyncio.get_running_loop()
        self._waiting[transport] = loop.call_later(self._deadline_s, self._abort, transport)

    def end(self, transport: asyncio.BaseTransport) -> None:
        """Stop the deadline, if it runs."""
        if timer := self._waiting.pop(transport, None):
            timer.cancel()

    @contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Generator[None]:
        """Stop the deadline: the head is complete, and what follows is its body."""
        if transport is None:  # the client is gone
            yield
            return
        self.end(transport)
        self._answering.add(transport)
        try:
            yield
        finally:
            self._answering.discard(transport)

    def _abort(self, transport: asyncio.BaseTransport) -> None:
        self.end(transport)
        cast("asyncio.Transport", transport).abort()


class _Connection(asyncio.Protocol):
    """Passes all events of a connection on, and tells the deadline of them."""

    def __init__(self, inner: asyncio.Protocol, deadline: HeadDeadline) -> None:
        self._inner, self._deadline = inner, deadline
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._deadline.begin(transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._deadline.begin(self._transport)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._deadline.end(self._transport)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
