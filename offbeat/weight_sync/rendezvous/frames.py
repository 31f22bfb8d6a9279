"""Authenticated messages on a stream. Only holders of a shared key can create them.

    length (4 bytes) | keyed digest of the body (32 bytes) | body

The digest is compared before any byte of a body is interpreted. It provides no secrecy, and no
protection against replay by an attacker who can read and alter the traffic.
"""

import hashlib
import hmac
import secrets
import struct
from typing import Final

import msgspec

from offbeat.messages.framing import FrameBuffer

_HEADER: Final = struct.Struct("<I32s")
HEADER_BYTES: Final = _HEADER.size
LONGEST_BODY: Final = 1 << 20
"""Bytes. The longest bodies hold a rank's addresses: some hundred bytes per rank of its world."""


class ForeignFrame(Exception):
    """The received bytes were not sent by a holder of the key. The connection is closed."""


class SharedKey(msgspec.Struct, frozen=True):
    """Secret shared by the processes of one run, passed through Ray calls and between trainer ranks."""

    secret: bytes

    @classmethod
    def random(cls) -> "SharedKey":
        return cls(secrets.token_bytes(32))

    def frame(self, body: bytes) -> bytes:
        """Return the frame of ``body``: length, digest and body."""
        return _HEADER.pack(len(body), self._digest(body)) + body

    def body_length(self, header: bytes) -> int:
        """Return the number of bytes after a header.

        Raises:
            ForeignFrame: The body would exceed the longest message.
        """
        length, _ = _HEADER.unpack(header)
        if length > LONGEST_BODY:
            raise ForeignFrame(f"a message of {length} bytes; {LONGEST_BODY} are allowed")
        return length

    def verify(self, header: bytes, body: bytes) -> None:
        """Check that a holder of the key created this body.

        Raises:
            ForeignFrame: The digest does not match this key.
        """
        _, digest = _HEADER.unpack(header)
        if not hmac.compare_digest(digest, self._digest(body)):
            raise ForeignFrame("a message that was made without the key of this run")

    def _digest(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self.secret, digest_size=32).digest()

    def __repr__(self) -> str:
        return "SharedKey(...)"  # it may be part of a record that is logged


class StoreAddress(msgspec.Struct, frozen=True):
    """Address and key of a store, passed only through Ray calls."""

    host: str
    port: int
    key: SharedKey


class FrameReader:
    """Assembles received bytes into bodies of messages."""

    def __init__(self, key: SharedKey) -> None:
        self._key = key
        self._buffer = FrameBuffer(key.body_length, HEADER_BYTES)

    def feed(self, data: bytes) -> None:
        self._buffer.feed(data)

    def next(self) -> bytes | None:
        """Return the body of the oldest complete message, or None if no message is complete.

        Raises:
            ForeignFrame: These bytes are not from a holder of the key.
        """
        frame = self._buffer.next()
        if frame is None:
            return None
        self._key.verify(*frame)
        return frame[1]


class Set(msgspec.Struct, frozen=True, tag=True):
    """Set the value of each key."""

    keys: list[str]
    values: list[bytes]


class Get(msgspec.Struct, frozen=True, tag=True):
    """Reply with the values of all keys once they are set."""

    keys: list[str]
    timeout_s: float


class Check(msgspec.Struct, frozen=True, tag=True):
    """Reply whether all keys are set: 1 or 0."""

    keys: list[str]


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add to a decimal number, which is initially 0, and reply with the sum."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True, tag=True):
    """Replace a value if it is the expected one, and reply with the value afterwards.

    If the key is missing, it is set if the expected value is empty. If it is not, the reply is the
    expected value.
    """

    key: str
    expected: bytes
    desired: bytes


class Append(msgspec.Struct, frozen=True, tag=True):
    """Add bytes to the end of a value, empty at first."""

    key: str
    value: bytes


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Remove a key, and reply whether it existed: 1 or 0."""

    key: str


class Count(msgspec.Struct, frozen=True, tag=True):
    """Reply with the number of keys."""


StoreRequest = Set | Get | Check | Add | CompareSet | Append | Delete | Count


class StoreReply(msgspec.Struct, frozen=True):
    """Reply to one request."""

    number: int = 0
    values: list[bytes] = []
    is_late: bool = False  # the keys were not set in time
