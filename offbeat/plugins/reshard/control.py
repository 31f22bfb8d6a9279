"""Control channel of a sender: one TCP connection per request of an engine rank.

It carries requests and answers of a few bytes each, never weights. Each side detects the death of
the other process immediately, and a hang at a timeout. Messages need the release's key.
"""

import contextlib
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from offbeat.plugins.reshard.messages import Answer, Join, Route
from offbeat.weight_sync.errors import SenderGone, TransferFailed
from offbeat.weight_sync.rendezvous.frames import ForeignFrame, FrameReader, SharedKey

log = structlog.stdlib.get_logger()
_RETRY_S: Final = 0.1  # between two attempts to accept if the process has no free descriptor
_SEND_S: Final = 1.0  # to send a few bytes into an empty buffer, which does not block
_MOST_STRANGERS: Final = 64
"""Maximum number of connections without a valid message. Beyond it, the oldest is closed. Such a
connection is not from a member, because a member sends its join when it connects."""
_decode_join = msgspec.msgpack.Decoder(Join).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def _listen(host: str) -> socket.socket:
    listening = socket.create_server((host, 0), backlog=512)
    listening.settimeout(0.0)  # a connection may be gone between select and accept
    return listening


class _Peer:
    def __init__(self, connection: socket.socket, key: SharedKey) -> None:
        self.socket, self.frames = connection, FrameReader(key)
        self.is_stranger = True  # no valid message received yet
        self.join: Join | None = None


class ControlServer:
    """Sender's end of the control channel. One thread receives. Any thread may call ``stop``."""

    def __init__(
        self,
        host: str,
        key: SharedKey,
        *,
        listen: Callable[[str], socket.socket] = _listen,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Listen on a free port of ``host`` and on no other address."""
        self._key, self._pause = key, pause
        self._listening = listen(host)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self.host, self.port = host, int(self._listening.getsockname()[1])
        self._stopped, self._stop = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}
        self._read = deque[Join | None]()

    def next(self, timeout_s: float | None = None) -> Join | None:
        """Remove and return the oldest request, or None if none arrived in time or after ``stop``."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._read:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            for key, _ in self._selector.select(left_s):
                self._readable(key.fileobj)
        return self._read.popleft()

    def post(self, join: Join, answer: Answer) -> None:
        """Answer a request, unless its member has disconnected."""
        message = self._key.frame(msgspec.msgpack.encode(answer))
        for peer in [each for each in self._peers.values() if each.join is join]:
            try:
                peer.socket.sendall(message)
            except OSError:
                self._lost(peer)

    def stop(self) -> None:
        """Make a waiting ``next`` return None."""
        with contextlib.suppress(OSError):  # already closed, so no thread waits
            self._stop.send(b"x")

    def close(self) -> None:
        """Close every connection."""
        for peer in list(self._peers.values()):
            peer.socket.close()
        self._peers.clear()
        self._selector.close()
        for each in (self._listening, self._stopped, self._stop):
            each.close()
        self._release_spare()

    def _readable(self, ready: object) -> None:
        if ready is self._listening:
            self._accept()
        elif ready is self._stopped:
            self._read.append(None)
        elif isinstance(ready, socket.socket) and ready in self._peers:
            self._receive(self._peers[ready])

    def _accept(self) -> None:
        try:
            connection = self._accept_peer()
        except BlockingIOError:
            return  # the peer has disconnected
        except OSError as error:
            log.error("weights.accept_failed", port=self.port, error=str(error))  # noqa: TRY400 -- one line
            self._turn_away(error)
            return
        self._peers[connection] = _Peer(connection, self._key)
        self._selector.register(connection, selectors.EVENT_READ)
        strangers = [peer for peer in self._peers.values() if peer.is_stranger]
        if len(strangers) > _MOST_STRANGERS:
            self._lost(strangers[0])

    def _accept_peer(self) -> socket.socket:
        connection, _ = self._listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_S)
        return connection

    def _turn_away(self, why: OSError) -> None:
        """Notify a member that could not be accepted, so that it does not wait until its timeout.

        Without a free descriptor the connection stays in the queue, and the queue stays readable. A
        reserved descriptor is used to remove it.
        """
        self._release_spare()
        answer = Answer(f"the sender cannot accept: {why}")
        try:
            with self._accept_peer() as connection:
                connection.sendall(self._key.frame(msgspec.msgpack.encode(answer)))
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)  # unread bytes would reset the connection with the answer
        except BlockingIOError:
            pass  # the failed connection has left the queue
        except OSError:
            self._pause(_RETRY_S)
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            self._spare = None  # another thread used it, so the next attempt has none

    def _release_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
            peer.frames.feed(data)
            while (body := peer.frames.next()) is not None:
                peer.is_stranger = False
                peer.join = _decode_join(body)
                self._read.append(peer.join)
        except (OSError, ForeignFrame, msgspec.MsgspecError):
            data = b""  # broken, or not a member
        if not data:
            self._lost(peer)

    def _lost(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        del self._peers[peer.socket]
        peer.socket.close()


class ControlClient:
    """Receiver's end of the control channel.

    Network errors become ``TransferFailed``, and ``SenderGone`` if the sender's process has ended.
    """

    def __init__(self, route: Route, epoch: int) -> None:
        self._epoch, self._where = epoch, f"{route.host}:{route.port}"
        self._key, self._frames = route.key, FrameReader(route.key)
        try:
            self._socket = socket.create_connection(
                (route.host, route.port), timeout=route.timeouts.slack_s
            )
        except ConnectionRefusedError as error:
            raise self._gone(0, f"is gone: {error}") from error
        except OSError as error:
            raise self._make_failure(0, f"cannot be reached: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def address(self) -> str:
        """Return this machine's address in the connection to the sender."""
        return str(self._socket.getsockname()[0])

    def send(self, join: Join) -> None:
        """Send a request to the sender."""
        try:
            self._socket.sendall(self._key.frame(msgspec.msgpack.encode(join)))
        except OSError as error:
            raise self._gone(0, f"is gone: {error}") from error

    def answer(self, at: int, patience_s: float) -> Answer:
        """Wait for the answer. Errors name the bucket ``at``."""
        self._socket.settimeout(patience_s)
        try:
            while (body := self._frames.next()) is None:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise self._gone(at, "is gone")
                self._frames.feed(data)
        except TimeoutError as error:
            raise self._make_failure(at, f"has not answered for {patience_s:.3g} s") from error
        except OSError as error:
            raise self._gone(at, f"is gone: {error}") from error
        except ForeignFrame as error:
            raise self._gone(at, f"is another process: {error}") from error
        return _decode_answer(body)

    def close(self) -> None:
        self._socket.close()

    def _gone(self, at: int, what: str) -> SenderGone:
        return SenderGone(self._epoch, at, f"the sender at {self._where} {what}")

    def _make_failure(self, at: int, what: str) -> TransferFailed:
        return TransferFailed(self._epoch, at, f"the sender at {self._where} {what}")
