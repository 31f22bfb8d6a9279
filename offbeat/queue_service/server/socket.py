"""Channel on the node: a Unix socket without a file, which serves processes of this user only."""

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
    """One client's connection; everything it asked and still waits for ends with it."""

    def __init__(self, desk: RequestHandler, open_ones: set["_Connection"]) -> None:
        self._desk, self._open_ones = desk, open_ones
        self._frames = frames()
        self._visit: Connection | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        if not is_ours(transport.get_extra_info("socket")):
            self._transport.abort()
            return
        self._visit = Connection(self._answer)
        self._open_ones.add(self)

    def data_received(self, data: bytes) -> None:
        if self._visit is None:  # a stranger's
            return
        try:
            self._frames.feed(data)
            while (frame := self._frames.next()) is not None:
                self._desk.take(self._visit, decode_call(frame[1]))
        except (ValueError, msgspec.DecodeError):  # not a client of ours: it has no say here
            assert self._transport is not None  # noqa: S101
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._open_ones.discard(self)
        if self._visit is not None:
            self._desk.leave(self._visit)

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, reply: Reply) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(encode(reply)))


def new_path() -> str:
    """A name for a socket that nobody guesses, and that is in no directory: it goes with its process."""
    with tempfile.TemporaryDirectory(prefix="offbeat-queue-") as unique:
        return f"\0{Path(unique).name}"


class Listener:
    """Serves a desk on a Unix socket, from ``open`` to ``close``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def open(self, desk: RequestHandler) -> None:
        """Begin to serve."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Connection(desk, self._connections), self._path
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in self._connections:
                connection.close()
