"""A stream of bytes, cut into the bodies of frames."""

from offbeat.queue_service.wire import LENGTH, MOST_FRAME_BYTES


class Frames:
    """Cuts a stream of bytes into bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now.

        Raises:
            ValueError: A frame longer than any of ours.
        """
        buffer, bodies, start = self._buffer, list[bytes](), 0
        buffer += data
        while len(buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            if length > MOST_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = start + LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + LENGTH.size : end]))
            start = end
        del buffer[:start]
        return bodies
