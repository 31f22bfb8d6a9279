"""Frames on a stream of bytes: a header with the length of the body, then the body.

A plain header has only the length. The journal's files use different frames, because these must
distinguish a torn tail from damage.
"""

import struct
from collections.abc import Callable
from typing import Final

LENGTH: Final = struct.Struct("<I")


def add_header(body: bytes) -> bytes:
    """Return the body with a plain header in front."""
    return LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Return the number of bytes that follow a plain header."""
    (length,) = LENGTH.unpack(header)
    return length


class FrameBuffer:
    """Assembles the pieces of a stream into frames."""

    def __init__(self, length_of: Callable[[bytes], int], header_bytes: int = LENGTH.size) -> None:
        """Create an empty buffer.

        ``length_of`` reads the length from a header of ``header_bytes``. ``next`` raises its
        errors.
        """
        self._length_of, self._header_bytes = length_of, header_bytes
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Append bytes as they were received."""
        self._received += data

    def next(self) -> tuple[bytes, bytes] | None:
        """Return header and body of the oldest complete frame, or None if no frame is complete."""
        start, received = self._header_bytes, self._received
        if len(received) < start:
            return None
        header = bytes(received[:start])
        end = start + self._length_of(header)
        if len(received) < end:
            return None
        body = bytes(received[start:end])
        del received[:end]
        return header, body
