"""Finished groups on disk, so that they outlive the controller that waits to train them.

One producer appends to one segment at a time; a file for each group would cost a hundred times
more, most of it in making the file. The receipt of a group says where its bytes are and which they
are, and is given out only once all of them are written, so nothing has to be written aside: a torn
write has no receipt, and whatever else happened to the bytes, the digest tells.

Nothing is synced: what is here has to survive processes, not a power cut. After one it may be gone,
and its group is rolled out again. Pure but for the files: no clock, no thread.
"""

import contextlib
import os
from collections.abc import Container
from pathlib import Path
from typing import Final

from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Spooled
from offbeat.transfer_queue.codec import (
    Columns,
    CorruptPayload,
    UnusableBuffer,
    digest_of,
    pack_into,
    packed_size,
    unpack,
)

FOLDER: Final = "spool"
"""Of a run directory: the spool of that run."""

SEGMENT_BYTES: Final = 16 * 2**20
"""A segment that holds so much is succeeded. So much can a single group keep on disk besides itself."""
_SUFFIX: Final = ".spool"


class NotInSpool(OffbeatError):
    """The columns of a receipt are missing on this machine's disk, or damaged."""

    def __init__(self, segment: str, offset: int, problem: str) -> None:
        super().__init__(segment, offset, problem)
        self.segment, self.offset, self.problem = segment, offset, problem

    def __str__(self) -> str:
        return f"{self.segment} at byte {self.offset}: {self.problem}"


def segment_name(producer: str, life: str, number: int) -> str:
    """File name of the segment that one life of a producer writes as its ``number``th."""
    return f"{producer}.{life}.{number:06d}{_SUFFIX}"


def parts(segment: str) -> tuple[str, str, int]:
    """Producer, life and number out of a segment's name."""
    producer, life, number, _ = segment.split(".")
    return producer, life, int(number)


class SpoolWriter:
    """The one writer of its segments. Calls are made one after the other, from any thread."""

    def __init__(
        self, directory: Path, producer: str, life: str, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Make it; nothing is touched before the first ``write``.

        Args:
            directory: Of the run's spool; made when it is missing.
            producer: Name of the process, the same one after a restart. Neither has a dot.
            life: Of the process: no other one of this producer has it.
            segment_bytes: A segment is succeeded once it holds so much.
        """
        self._directory, self._producer, self._life = directory, producer, life
        self._segment_bytes = segment_bytes
        self._number = 0
        self._segment = ""
        self._file: int | None = None
        self._written = 0
        self._scratch = bytearray()

    def write(self, columns: Columns) -> Spooled:
        """Append one group; it can be read as soon as this returns.

        Raises:
            SchemaError: A column that cannot be written.
            OSError: The disk refused. Nothing of the group is kept, and the next one is tried anew.
        """
        packed = self._packed(columns)
        if self._file is None:
            self._file = self._opened()
        offset = self._written
        try:
            self._append(self._file, packed)
        except OSError:
            self._give_back(offset)
            raise
        if self._written >= self._segment_bytes:
            self.rotate()
        return Spooled(self._segment, offset, len(packed), digest_of(packed))

    def rotate(self) -> None:
        """Start a new segment for the next writes; the current one may be removed from now on."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _packed(self, columns: Columns) -> memoryview:
        """The group in a buffer that is used again: fresh memory costs more than the copy."""
        try:
            nbytes = pack_into(self._scratch, columns)
        except UnusableBuffer:  # larger than all before
            self._scratch = bytearray(packed_size(columns))
            nbytes = pack_into(self._scratch, columns)
        return memoryview(self._scratch)[:nbytes]

    def _opened(self) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._number += 1
        self._segment = segment_name(self._producer, self._life, self._number)
        self._written = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        return os.open(self._directory / self._segment, flags, 0o644)

    def _append(self, file: int, packed: memoryview) -> None:
        left = packed
        while left:
            written = os.write(file, left)  # a disk that fills up takes a part
            left = left[written:]
        self._written += len(packed)

    def _give_back(self, offset: int) -> None:
        """Free what a refused group took, and this segment with it if it holds no other one."""
        with contextlib.suppress(OSError):
            if offset:
                os.truncate(self._directory / self._segment, offset)
            else:
                (self._directory / self._segment).unlink()
        self.rotate()


def read(directory: Path, place: Spooled) -> Columns:
    """The columns that a receipt vouches for, byte for byte.

    Raises:
        NotInSpool: The segment is gone, cannot be read, or holds something else.
    """

    def problem(text: str) -> NotInSpool:
        return NotInSpool(place.segment, place.offset, text)

    if Path(place.segment).name != place.segment:
        raise problem("no name of a segment")
    try:
        with (directory / place.segment).open("rb", buffering=0) as file:
            file.seek(place.offset)
            there = os.fstat(file.fileno()).st_size - place.offset
            # No more room is made than there are bytes, whatever the receipt says.
            packed = bytearray(max(0, min(place.nbytes, there)))
            size = file.readinto(packed)
    except OSError as error:
        raise problem(error.strerror or str(error)) from error
    if size != place.nbytes:
        raise problem(f"ends after {size} of {place.nbytes} bytes")
    try:
        columns = unpack(packed)
    except CorruptPayload as error:
        raise problem(str(error)) from error
    if digest_of(packed) != place.digest:
        raise problem("another group than the receipt's")
    return columns


def sweep(directory: Path, keep: Container[str] = ()) -> int:
    """Remove the segments that are not in ``keep``; returns how many. What cannot go, stays."""
    removed = 0
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        if path.name not in keep:
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    with contextlib.suppress(OSError):  # it is not empty, or not there
        directory.rmdir()
    return removed
