"""Key-value store over TCP that serves only holders of its key.

    waits for            until
    a first request      ``stranger_s``, then the connection is closed
    a further request    the client closes the connection, or the process ends
    keys                 a client sets them, or the request times out

The server runs in a separate thread, because its process may be blocked in a collective.
"""

import asyncio
import contextlib
import socket
import threading
from typing import Final

import msgspec

from offbeat.weight_sync.rendezvous.frames import (
    HEADER_BYTES,
    Add,
    Append,
    Check,
    CompareSet,
    Count,
    Delete,
    ForeignFrame,
    Get,
    Set,
    SharedKey,
    StoreReply,
    StoreRequest,
)

STRANGER_S: Final = 10.0
"""Seconds that a connection may stay without a valid request. Clients send one at once."""
MOST_STRANGERS: Final = 64
"""Maximum connections without a valid request.

If there are more, the oldest is closed. It cannot be a client, because clients have sent their
first request when they are accepted.
"""
_ACCEPTED_AT_ONCE: Final = 8
"""Connections accepted per turn of the event loop.

A client's request is read some turns later. By then, not enough other connections have arrived to
make the server close the client's.
"""
_BACKLOG: Final = 512
"""Connections that the system queues before they are accepted: all ranks may connect at once."""
_decode_request = msgspec.msgpack.Decoder[StoreRequest](
    Set | Get | Check | Add | CompareSet | Append | Delete | Count
).decode


class StoreServer:
    """Key-value store that serves until it is closed or its process ends."""

    def __init__(
        self,
        host: str,
        key: SharedKey,
        *,
        stranger_s: float = STRANGER_S,
        most_strangers: int = MOST_STRANGERS,
    ) -> None:
        """Listen on a free port of ``host`` and on no other address."""
        self._key, self._stranger_s, self._most_strangers = key, stranger_s, most_strangers
        self._listening = socket.create_server((host, 0), backlog=_BACKLOG)
        self.host, self.port = host, int(self._listening.getsockname()[1])
        self._values = dict[str, bytes]()
        self._strangers = dict[asyncio.StreamWriter, None]()  # oldest first
        self._tasks = set[asyncio.Task[None]]()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._changed = asyncio.Condition()
        self._thread = threading.Thread(target=self._run, name="store-server", daemon=True)
        self._thread.start()

    def forget(self, prefix: str) -> None:
        """Remove every key that starts with ``prefix``."""
        self._loop.call_soon_threadsafe(self._forget, prefix)

    def close(self) -> None:
        """Close all connections and return. A second call does nothing."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accept, sock=self._listening, backlog=_ACCEPTED_AT_ONCE
        )
        self._listening.listen(_BACKLOG)  # asyncio uses one number for backlog and accepts
        await self._closing.wait()
        await self._finish_accepting()
        # The runner cancels the clients next. From Python 3.12.1 on, ``async with server`` would
        # wait for them first, for ever if a client stays connected.
        server.close()
        for stranger in self._strangers:  # a task cancelled before its start closes nothing
            stranger.transport.abort()

    async def _finish_accepting(self) -> None:
        """Stop accepting connections, and wait until asyncio has opened the accepted ones.

        A closed server could not open them, and their clients would wait for a reply in vain.
        """
        self._loop.remove_reader(self._listening)
        ours = {asyncio.current_task(), *self._tasks}
        if opening := asyncio.all_tasks() - ours:
            await asyncio.wait(opening)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing.is_set():
            writer.transport.abort()
            return
        self._strangers[writer] = None
        if len(self._strangers) > self._most_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        task = self._loop.create_task(self._client(reader, writer), name="store-client")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._talk(reader, writer)
        except (OSError, EOFError, TimeoutError, ForeignFrame, msgspec.MsgspecError):
            pass  # the client is gone, or was not authenticated
        finally:
            self._strangers.pop(writer, None)
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._stranger_s):
            request = await self._request(reader)
        self._strangers.pop(writer, None)
        while True:
            reply = await self._answer(request)
            writer.write(self._key.frame(msgspec.msgpack.encode(reply)))
            await writer.drain()
            request = await self._request(reader)

    async def _request(self, reader: asyncio.StreamReader) -> StoreRequest:
        header = await reader.readexactly(HEADER_BYTES)
        body = await reader.readexactly(self._key.body_length(header))
        self._key.verify(header, body)
        return _decode_request(body)

    # --- the values ------------------------------------------------------------------------------

    async def _answer(self, request: StoreRequest) -> StoreReply:
        match request:
            case Get(keys, timeout_s):
                return await self._when_there(keys, timeout_s)
            case Check(keys):
                return StoreReply(int(self._has(keys)))
            case Count():
                return StoreReply(len(self._values))
            case Delete(key):
                return StoreReply(int(self._values.pop(key, None) is not None))
            case _:
                async with self._changed:
                    reply = self._change(request)
                    self._changed.notify_all()
                return reply

    def _change(self, request: Set | Add | CompareSet | Append) -> StoreReply:
        match request:
            case Set(keys, values):
                self._values.update(zip(keys, values, strict=True))
                return StoreReply()
            case Add(key, amount):
                total = int(self._values.get(key, b"0")) + amount
                self._values[key] = str(total).encode()
                return StoreReply(total)
            case CompareSet(key, expected, desired):
                if self._values.get(key, b"") == expected:
                    self._values[key] = desired
                return StoreReply(values=[self._values.get(key, expected)])
            case Append(key, value):
                self._values[key] = self._values.get(key, b"") + value
                return StoreReply()

    async def _when_there(self, keys: list[str], timeout_s: float) -> StoreReply:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._has(keys))
                return StoreReply(values=[self._values[key] for key in keys])
        except TimeoutError:
            return StoreReply(is_late=True)

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _forget(self, prefix: str) -> None:
        for key in [key for key in self._values if key.startswith(prefix)]:
            del self._values[key]
