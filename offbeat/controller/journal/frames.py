"""Encodes and decodes the journal's files: a header, then frames. No I/O.

    header   kind (8 bytes) | format u32 | schema u32 | follows u32 | follows_bytes u64 | CRC-32 u32
    frame    length u32 | CRC-32 of the payload u32 | payload, MessagePack, never empty

A snapshot and a file of aggregates name the same preceding segment as the segment that has their
number. So a reader can detect a file from another run. All numbers are little endian. After a
crash, a file has a header and complete frames, then at most a torn tail, which is ignored. Bad
bytes before a complete frame are damage, not a torn tail.

Also defines the errors of a journal. Each names the file, the values, and the fix.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from offbeat.controller.events import SCHEMA
from offbeat.messages.failures import OffbeatError


class JournalFailed(OffbeatError):
    """The disk refused a write or an fsync. What it stored since the last barrier is unknown.

    Fix: free or repair the disk, then resume the run.
    """

    file: str
    problem: str

    def __str__(self) -> str:
        return (
            f"journal {self.file} cannot be written: {self.problem}. Free or repair the disk, then "
            "resume the run: everything before the last barrier is intact"
        )


class JournalRemoved(JournalFailed):
    """Somebody has removed a file of the journal that its run still writes.

    Fix: restore the directory from a copy, or start a new run.
    """

    def __str__(self) -> str:
        return (
            f"journal {self.file} was removed during its run: {self.problem}. Restore the run "
            "directory from a copy, or start a new run; an exported model may be its model.path"
        )


class JournalTaken(OffbeatError):
    """Another controller writes this journal. The newer one continues, the older one must end.

    Fix: the run was resumed twice: stop one of the two.
    """

    file: str

    def __str__(self) -> str:
        return (
            f"journal {self.file} belongs to another controller of this run. Only the newest "
            "controller continues: stop the other one, or name another run directory"
        )


class JournalCorrupt(OffbeatError):
    """A file of the journal was damaged after it was written. A crash cannot cause that.

    Fix: restore a copy, or start a new run from ``checkpoints/step_N``.
    """

    file: str
    offset: int
    problem: str

    def __str__(self) -> str:
        return (
            f"journal {self.file} is damaged at byte {self.offset}: {self.problem}. Bring the file "
            "back from a copy, or start a new run from the last checkpoint's model"
        )


class JournalVersion(OffbeatError):
    """The journal was written by a different version of this package.

    Fix: use the version of offbeat that wrote it.
    """

    file: str
    what: str
    found: int
    known: int

    def __str__(self) -> str:
        newer = "a newer" if self.found > self.known else "an older"
        return (
            f"journal {self.file} has {self.what} {self.found}, this version of offbeat reads "
            f"{self.known}. Continue with {newer} offbeat, the one that began the run, or start a new "
            "run from the last checkpoint's model"
        )


FORMAT: Final = 1
"""Version of headers and frames."""

SEGMENT: Final = b"offbtEVT"
SNAPSHOT: Final = b"offbtSNP"
AGGREGATES: Final = b"offbtAGG"

_HEADER: Final = struct.Struct("<8sIIIQ")
_CRC: Final = struct.Struct("<I")
_FRAME: Final = struct.Struct("<II")
HEADER_BYTES: Final = _HEADER.size + _CRC.size


class SegmentHeader(NamedTuple):
    """Header of a segment: number and bytes of the segment before it, both 0 if there is none."""

    follows: int
    follows_bytes: int


def header(kind: bytes, follows: int = 0, follows_bytes: int = 0) -> bytes:
    """Return the first bytes of a file of this kind, as this version of offbeat writes it."""
    fields = _HEADER.pack(kind, FORMAT, SCHEMA, follows, follows_bytes)
    return fields + _CRC.pack(zlib.crc32(fields))


def parse_header(file: str, data: bytes, kind: bytes) -> SegmentHeader | None:
    """Return the header, or None if a crash tore it. In that case the file contains nothing else.

    Args:
        file: Name of the file, for errors.
        data: Bytes of the file. If the file is longer than a header, at least one byte more than a
            header.
        kind: Expected kind of the file.

    Raises:
        JournalVersion: The file has a different format or schema.
        JournalCorrupt: The file does not begin with a header.
    """
    if len(data) < HEADER_BYTES:
        return None
    fields = data[: _HEADER.size]
    found, layout, schema, follows, follows_bytes = _HEADER.unpack(fields)
    whole = data[_HEADER.size : HEADER_BYTES] == _CRC.pack(zlib.crc32(fields))
    if found == kind and layout != FORMAT:
        raise JournalVersion(file, "format", layout, FORMAT)
    if found == kind and whole:
        if schema != SCHEMA:
            raise JournalVersion(file, "schema", schema, SCHEMA)
        return SegmentHeader(follows, follows_bytes)
    if len(data) == HEADER_BYTES:
        return None
    raise JournalCorrupt(file, 0, f"it does not begin with the header of {kind.decode()}")


def frame(payload: bytes) -> bytes:
    """Return a payload in its frame: length, checksum, payload."""
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def frames(file: str, data: bytes, limit: int | None = None) -> Iterator[tuple[memoryview, int]]:
    """Yield the payloads of a file, each with the offset at which its frame ends.

    Args:
        file: Name of the file, for errors.
        data: Bytes of the file, including its header.
        limit: Number of bytes, which must end with a complete frame. Later bytes are not read.
            None: the whole file, which may have a torn tail.

    Raises:
        JournalCorrupt: A frame is bad, and a torn tail cannot explain it.
    """
    view = memoryview(data)[:limit]
    if limit is not None and len(view) < limit:
        problem = f"it ends here, but the next segment was begun after {limit} bytes"
        raise JournalCorrupt(file, len(view), problem)
    offset = HEADER_BYTES
    while offset < len(view):
        end = _frame_end(view, offset)
        if end is None:
            problem = find_damage(view, offset + 1)
            if problem is not None:
                raise JournalCorrupt(file, offset, problem)
            if limit is not None:
                raise JournalCorrupt(file, offset, "a bad frame that was durable once")
            return
        yield view[offset + _FRAME.size : end], end
        offset = end


def _frame_end(view: memoryview, offset: int) -> int | None:
    """Return the end of the frame at ``offset``, or None if no complete frame begins there.

    Zeros, which a crash may leave, are not a frame.
    """
    start = offset + _FRAME.size
    if start > len(view):
        return None
    length, crc = _FRAME.unpack_from(view, offset)
    end = start + length
    if length == 0 or end > len(view) or zlib.crc32(view[start:end]) != crc:
        return None
    return end


_SEARCHED_BYTES: Final = 8 * 2**20
"""Bytes after a bad frame that are searched for a complete frame: more than a crash can tear."""
_SUMMED_BYTES: Final = 256 * 2**20
"""Limit on the bytes that this search checksums: bad lengths could make its cost quadratic."""


def find_damage(
    view: memoryview,
    offset: int,
    searched_bytes: int = _SEARCHED_BYTES,
    summed_bytes: int = _SUMMED_BYTES,
) -> str | None:
    """Return why the bytes from ``offset`` on are not a torn tail, or None if they may be one.

    If they contain a complete frame, the file is damaged. The search tries every byte, because
    lengths may be damaged. More bytes than a crash can tear are damage, too. Zeros at the end are
    not searched.
    """
    tail = bytes(view[offset:]).rstrip(b"\0")
    summed = 0
    for place in range(min(len(tail), searched_bytes)):
        length = int.from_bytes(tail[place : place + 4], "little")
        if not 0 < length <= len(view) - offset - place - _FRAME.size:
            continue
        summed += length
        if summed > summed_bytes:
            break
        if _frame_end(view, offset + place) is not None:
            return f"a bad frame before a whole one at {offset + place}"
    else:
        if len(tail) <= searched_bytes:
            return None
    return "a bad frame, and more bytes without a whole one than a crash can leave"
