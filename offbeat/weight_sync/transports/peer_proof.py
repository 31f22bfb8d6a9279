"""Accepts the one connection whose other end proves that it is the expected peer.

Whoever reaches a port can connect to it: a port scan, another job, an engine of an earlier request.
Such a connection is dropped, and the wait for the peer goes on to its deadline.
"""

import hmac
import secrets
import selectors
import socket
import time
from typing import Final, Self

import msgspec
import structlog

from offbeat.weight_sync.rendezvous.frames import ForeignFrame, FrameReader, SharedKey
from offbeat.weight_sync.transports.group import BrokenLink

log = structlog.stdlib.get_logger()
_MOST_STRANGERS: Final = 64
"""Connections without a proof at a time. Beyond, the oldest is dropped: a peer proves itself at once."""


class PeerProof(msgspec.Struct, frozen=True):
    """First message of a peer; it travels in a frame with the key of the run."""

    token: bytes  # random, for one link; the peer has it from the store
    plan_digest: str

    @classmethod
    def fresh(cls, plan_digest: str) -> "PeerProof":
        """Return what the peer of a new link has to send."""
        return cls(secrets.token_bytes(32), plan_digest)

    def problem(self, expected: "PeerProof") -> str:
        """Return why this is not what was expected; empty if it is."""
        if not hmac.compare_digest(self.token, expected.token):
            return "it has the token of another link"
        if not hmac.compare_digest(self.plan_digest.encode(), expected.plan_digest.encode()):
            return (
                f"it goes by another plan: {self.plan_digest[:8]}, not {expected.plan_digest[:8]}"
            )
        return ""

    def __repr__(self) -> str:
        return f"PeerProof(plan_digest={self.plan_digest!r})"  # the token is a secret


_decode: Final = msgspec.msgpack.Decoder(PeerProof).decode


def accept_peer(
    listening: socket.socket, key: SharedKey, expected: PeerProof, limit_s: float
) -> socket.socket:
    """Return the connection of the expected peer, which has ``limit_s`` for its next message too.

    Raises:
        BrokenLink: It has not connected in time. All other connections are closed.
        OSError: The port cannot accept.
    """
    with _Waiting(listening, key, expected) as waiting:
        connection = waiting.peer(limit_s)
    connection.settimeout(limit_s)
    return connection


class _Waiting:
    """Connections that have not proved anything yet, oldest first."""

    def __init__(self, listening: socket.socket, key: SharedKey, expected: PeerProof) -> None:
        self._listening, self._key, self._expected = listening, key, expected
        self._strangers = dict[socket.socket, FrameReader]()
        self._selector = selectors.DefaultSelector()
        self._dropped = 0

    def __enter__(self) -> Self:
        self._listening.settimeout(0.0)  # a connection may be gone between select and accept
        self._selector.register(self._listening, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for each in self._strangers:
            each.close()

    def peer(self, limit_s: float) -> socket.socket:
        until_s = time.monotonic() + limit_s
        while (left_s := until_s - time.monotonic()) > 0:
            for ready, _ in self._selector.select(left_s):
                if ready.fileobj is self._listening:
                    self._accept()
                elif isinstance(ready.fileobj, socket.socket) and self._is_peer(ready.fileobj):
                    self._forget(ready.fileobj)
                    return ready.fileobj
        strangers = self._dropped + len(self._strangers)
        others = f"; {strangers} others did" if strangers else ""
        raise BrokenLink(f"the other end has not connected within {limit_s:.3g} s{others}")

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has disconnected
        connection.settimeout(0.0)
        self._strangers[connection] = FrameReader(self._key)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)), "too many connections that prove nothing")

    def _is_peer(self, connection: socket.socket) -> bool:
        """Read what has arrived; drop the connection if its end cannot be the peer.

        The peer says nothing more before it has a handle, so nothing that a link needs is read here.
        """
        frames = self._strangers[connection]
        try:
            data = connection.recv(1 << 16)
            frames.feed(data)
            body = frames.next()
            problem = "" if data else "it has closed"
            if body is not None:
                said_all = "" if frames.is_empty else "it goes on talking before it is answered"
                problem = _decode(body).problem(self._expected) or said_all
        except BlockingIOError:
            return False
        except (OSError, ForeignFrame, msgspec.MsgspecError) as error:
            body, problem = None, str(error)
        if problem:
            self._drop(connection, problem)
        return body is not None and not problem

    def _drop(self, stranger: socket.socket, why: str) -> None:
        self._dropped += 1
        log.warning("weights.stranger_dropped", address=_address_of(stranger), why=why)
        self._forget(stranger)
        stranger.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._strangers[connection]


def _address_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "gone"
