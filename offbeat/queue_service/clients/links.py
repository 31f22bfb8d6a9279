"""Client's end of the Unix socket: a blocking one for any thread, and one for an event loop."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from offbeat.messages.failures import ActorLost, DeadlineExceeded
from offbeat.messages.framing import LENGTH, framed
from offbeat.queue_service import wire
from offbeat.queue_service.credentials import is_ours
from offbeat.queue_service.errors import ClientClosed
from offbeat.queue_service.storage.arenas import Slot
from offbeat.queue_service.wire import (
    Attach,
    Claim,
    Nothing,
    Probe,
    Release,
    Reply,
    WireCall,
)

RECEIVED_AT_ONCE: Final = 64 << 10


Freed = Callable[[Sequence[Slot]], None]
"""Callback that receives the slots that the client may write to again."""


def anchor(path: str, queue: str, client: str) -> socket.socket:
    """Open a connection without messages, whose end notifies the service that this client is gone.

    Raises:
        ActorLost: No service listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)  # a process of this user has answered there before
        connection.sendall(wire.one_way(Attach(client, maps=False)))
    except OSError as error:
        connection.close()
        raise ActorLost(queue, "connect", str(error)) from None
    return connection


def shares_memory(path: str, probed: Reply) -> bool:
    """Return whether this process can map the service's memory: same node, and permitted."""
    if probed.failure is not None:
        return False
    try:
        memory = wire.ARENA.decode(probed.value).opened(writable=True)
    except OSError:
        return False
    return memory[: len(path.encode())] == path.encode()


class BlockingCarrier(Protocol):
    """Carries calls to the service and their replies back, blocking."""

    @property
    def closed(self) -> bool: ...
    @property
    def client(self) -> str: ...
    def exchange(self, op: wire.Op, unpinned: tuple[Slot, ...], wait_s: float) -> Reply: ...
    def close(self) -> None: ...


class LoopCarrier(Protocol):
    """Carries calls to the service and their replies back, on one event loop."""

    @property
    def closed(self) -> bool: ...
    @property
    def client(self) -> str: ...
    async def exchange(self, op: wire.Op, unpinned: tuple[Slot, ...], wait_s: float) -> Reply: ...
    def close(self) -> None: ...


class BlockingLink:
    """Blocking connection to the service; a call that waits uses a connection of its own."""

    def __init__(self, path: str, queue: str, answer_s: float, freed: Freed, *, maps: bool) -> None:
        """Connect.

        Args:
            path: Path of the socket.
            queue: Name of the service in errors.
            answer_s: Seconds to wait for a reply, beyond those that a call asks to wait.
            freed: Called with the slots that each reply reports as free.
            maps: Share memory with the service, where that works.

        Raises:
            ActorLost: No service listens there.
        """
        self._path, self._queue, self._answer_s = path, queue, answer_s
        self._freed = freed
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._closed = self._lost = False
        self._next_id = 1
        self._name: str | None = None
        self.maps = False
        self._idle.append(self._connect())
        if maps and shares_memory(path, self.exchange(Probe(), (), 0.0)):
            self.maps = True
            self.exchange(Attach(self._name, maps=True), (), 0.0)

    @property
    def client(self) -> str:
        """Name that the service gave to this client."""
        return self._name or "a client"

    def exchange(self, op: wire.Op, unpinned: tuple[Slot, ...], wait_s: float) -> Reply:
        """Send one call and return its reply.

        Raises:
            ActorLost: The service has ended, or ended before it replied.
            DeadlineExceeded: No reply in time. Whether the call was executed is unknown.
            ClientClosed: The client was closed.
        """
        during = type(op).__name__
        with self._lock:
            if self._closed:
                raise ClientClosed(self._queue, during)
            self._next_id += 1
            call = WireCall(self._next_id, op, unpinned)
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect()
        reply = self._carry(connection, call, during, wait_s)
        with self._lock:
            self._idle.append(connection)
        if reply.freed:
            self._freed(reply.freed)
        return reply

    @property
    def closed(self) -> bool:
        return self._closed or self._lost

    def close(self) -> None:
        """Disconnect; calls that wait in other threads raise ``ActorLost``."""
        with self._lock:
            self._closed = True
            for connection in self._all:
                # Wakes a thread that waits in it; ``close`` alone would not
                with contextlib.suppress(OSError):  # it may be shut down already
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            self._all.clear()
            self._idle.clear()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise ActorLost(self._queue, "connect", str(error)) from None
        if not is_ours(connection):
            connection.close()
            raise ActorLost(self._queue, "connect", "another user's process listens in its place")
        with self._lock:
            closed = self._closed
            if not closed:
                self._all.add(connection)
        if closed:  # by another thread, after this one started
            connection.close()
            raise ClientClosed(self._queue, "connect")
        reply = self._carry(
            connection, WireCall(1, Attach(self._name, maps=self.maps)), "Attach", 0.0
        )
        self._name = wire.NAME.decode(reply.value)
        return connection

    def _carry(
        self, connection: socket.socket, call: WireCall, during: str, wait_s: float
    ) -> Reply:
        within_s = wait_s + self._answer_s
        try:
            connection.settimeout(within_s)
            connection.sendall(framed(wire.encode(call)))
            return wire.decode_reply(self._receive(connection))
        except TimeoutError:
            self._drop(connection)
            raise DeadlineExceeded(self.client, f"{during} of {self._queue}", within_s) from None
        except OSError as error:
            self._drop(connection)
            self._lost = True
            raise ActorLost(self._queue, during, str(error)) from None
        # A signal while waiting: the reply, if it comes, would be read by the next call
        except BaseException:
            self._drop(connection)
            raise

    def _receive(self, connection: socket.socket) -> bytes:
        data = connection.recv(RECEIVED_AT_ONCE)
        while data and len(data) < LENGTH.size:
            data += connection.recv(LENGTH.size - len(data))
        if not data:
            raise ConnectionResetError("it closed the connection")
        (length,) = LENGTH.unpack_from(data)
        missing = LENGTH.size + length - len(data)
        if not missing:
            return data[LENGTH.size :]
        parts = [data[LENGTH.size :]]
        while missing:
            part = connection.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionResetError("it closed the connection")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()


class _Receiver(asyncio.Protocol):
    """Delivers replies to the calls that wait for them."""

    def __init__(self, link: "LoopLink") -> None:
        self._link = link
        self._frames = wire.frames()

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        while (frame := self._frames.next()) is not None:
            self._link.deliver(wire.decode_reply(frame[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.lost(str(exc) if exc else "it closed the connection")


class LoopLink:
    """Connection to the service for one event loop; carries any number of calls concurrently."""

    def __init__(self, queue: str, answer_s: float, freed: Freed) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._queue, self._answer_s, self._freed = queue, answer_s, freed
        self._abandoned: set[int] = set()  # ids of cancelled claims that are not answered yet
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next_id = 0
        self._why_lost: str | None = None
        self._closed = self.maps = False
        self.client = "a client"

    @classmethod
    async def connect(
        cls, path: str, queue: str, answer_s: float, freed: Freed, *, maps: bool
    ) -> "LoopLink":
        """Connect; see ``BlockingLink``.

        Raises:
            ActorLost: No service listens there.
        """
        link = cls(queue, answer_s, freed)
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_unix_connection(lambda: _Receiver(link), path)
        except OSError as error:
            raise ActorLost(queue, "connect", str(error)) from None
        if not is_ours(transport.get_extra_info("socket")):
            transport.abort()
            raise ActorLost(queue, "connect", "another user's process listens in its place")
        link._transport = cast("asyncio.WriteTransport", transport)
        reply = await link.exchange(Attach(None, maps=False), (), 0.0)
        link.client = wire.NAME.decode(reply.value)
        if maps and shares_memory(path, await link.exchange(Probe(), (), 0.0)):
            link.maps = True
            await link.exchange(Attach(link.client, maps=True), (), 0.0)
        return link

    async def exchange(self, op: wire.Op, unpinned: tuple[Slot, ...], wait_s: float) -> Reply:
        """Send one call and return its reply; see ``BlockingLink``.

        Cancelling withdraws a waiting call.
        """
        during = type(op).__name__
        if self._closed or self._transport is None:
            raise ClientClosed(self._queue, during)
        if self._why_lost is not None:
            raise ActorLost(self._queue, during, self._why_lost)
        id_ = self._next_id = self._next_id + 1
        frame = framed(wire.encode(WireCall(id_, op, unpinned)))
        loop = asyncio.get_running_loop()
        reply = self._waiting[id_] = loop.create_future()
        self._send(frame)
        within_s = wait_s + self._answer_s
        timer = loop.call_later(within_s, self._overdue, id_, during, within_s)
        try:
            return await reply
        except (asyncio.CancelledError, DeadlineExceeded):
            answered = reply.done() and not reply.cancelled() and reply.exception() is None
            if isinstance(op, Claim) and answered:
                self._return(reply.result())
            elif isinstance(op, Claim):
                self._abandoned.add(id_)
            self._send(wire.one_way(Nothing(), cancels=id_))
            raise
        finally:
            timer.cancel()
            del self._waiting[id_]

    @property
    def closed(self) -> bool:
        return self._closed or self._why_lost is not None

    def close(self) -> None:
        """Disconnect; calls that wait raise ``ActorLost``."""
        self._closed = True
        if self._transport is not None:
            self._transport.close()
        self.lost("this client was closed")

    def deliver(self, reply: Reply) -> None:
        if reply.freed:
            self._freed(reply.freed)
        waiting = self._waiting.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
        elif reply.id in self._abandoned:
            self._abandoned.discard(reply.id)
            self._return(reply)

    def lost(self, why: str) -> None:
        self._why_lost = self._why_lost or why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ActorLost(self._queue, "a call", self._why_lost))

    def _return(self, reply: Reply) -> None:
        """Release groups that were delivered to a cancelled call, so that others can claim them."""
        if reply.failure is None and (delivery := wire.DELIVERY.decode(reply.value)) is not None:
            slots = wire.slots_of(delivery.payloads)
            self._send(wire.one_way(Release(delivery.lease.id), slots))

    def _send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _overdue(self, id_: int, during: str, within_s: float) -> None:
        waiting = self._waiting.get(id_)
        if waiting is not None and not waiting.done():
            waiting.set_exception(
                DeadlineExceeded(self.client, f"{during} of {self._queue}", within_s)
            )
