"""Abstract Unix socket of the service, open to processes of this user only."""

import asyncio
import tempfile
from pathlib import Path
from typing import cast

import msgspec

from offbeat.messages.framing import framed
from offbeat.queue_service.credentials import is_ours
from offbeat.queue_service.server.connections import Connection
from offbeat.queue_service.server.request_handler import RequestHandler
from offbeat.queue_service.wire import Reply, decode_call, encode, frames


class _Connection(asyncio.Protocol):
    """One client's connection; its calls that still wait end with it."""

    def __init__(self, handler: RequestHandler, open_ones: set["_Connection"]) -> None:
        self._handler, self._open_ones = handler, open_ones
        self._frames = frames()
        self._connection: Connection | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        if not is_ours(transport.get_extra_info("socket")):
            self._transport.abort()
            return
        self._connection = Connection(self._answer)
        self._open_ones.add(self)

    def data_received(self, data: bytes) -> None:
        if self._connection is None:  # of another user
            return
        try:
            self._frames.feed(data)
            while (frame := self._frames.next()) is not None:
                self._handler.take(self._connection, decode_call(frame[1]))
        except (ValueError, msgspec.DecodeError):  # not a client of ours: it has no say here
            assert self._transport is not None  # noqa: S101
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._open_ones.discard(self)
        if self._connection is not None:
            self._handler.leave(self._connection)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, reply: Reply) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(encode(reply)))


def new_path() -> str:
    """Return an unguessable name for an abstract socket, which vanishes with its process."""
    with tempfile.TemporaryDirectory(prefix="offbeat-queue-") as unique:
        return f"\0{Path(unique).name}"


class Listener:
    """Serves a request handler on a Unix socket, from ``open`` to ``close``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def open(self, handler: RequestHandler) -> None:
        """Start to serve."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Connection(handler, self._connections), self._path
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in self._connections:
                connection.close()
