"""Spool: finished groups on disk, so that they survive a restart of the controller.

A producer appends to one segment at a time. One file per group would cost a hundred times more,
mostly for creating the file. The receipt of a group names its location and digest. It is issued
only once all bytes are written. So no temporary file is needed: a torn write has no receipt, and
the digest detects any other damage.

Nothing is synced to disk, because the spool must survive the end of processes, but not a power cut.
A lost group is rolled out again. Pure except for the files: no clock, no thread.
"""

import contextlib
import os
from collections.abc import Container
from pathlib import Path
from typing import Final

import numpy as np

from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Spooled
from offbeat.transfer_queue.codec import CorruptPayload, pack, read_digest, unpack
from offbeat.transfer_queue.schema import Columns

FOLDER: Final = "spool"
"""Directory of the spool in a run directory."""

SEGMENT_BYTES: Final = 16 * 2**20
"""Size at which a new segment is started. It limits the disk space that one group keeps in use."""
_SUFFIX: Final = ".spool"


class NotInSpool(OffbeatError):
    """The columns of a receipt are missing on this machine's disk, or damaged.

    Fix: none: the groups are rolled out again.
    """

    segment: str
    offset: int
    problem: str

    def __str__(self) -> str:
        return f"{self.segment} at byte {self.offset}: {self.problem}"


def segment_name(producer: str, incarnation: str, number: int) -> str:
    """Return the file name of segment ``number`` of one incarnation of a producer."""
    return f"{producer}.{incarnation}.{number:06d}{_SUFFIX}"


def parts(segment: str) -> tuple[str, str, int]:
    """Split a segment's name into producer, incarnation and number."""
    producer, incarnation, number, _ = segment.split(".")
    return producer, incarnation, int(number)


class SpoolWriter:
    """The only writer of its segments. Calls must not overlap, but may come from any thread."""

    def __init__(
        self,
        directory: Path,
        producer: str,
        incarnation: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Create the writer. No file is touched before the first ``write``.

        Args:
            directory: Directory of the run's spool. Created if missing.
            producer: Name of the process, the same after a restart. Must not contain a dot.
            incarnation: Name of this start of the process, unique for the producer. Must not
                contain a dot.
            segment_bytes: Size at which a new segment is started.
        """
        self._directory, self._producer, self._incarnation = directory, producer, incarnation
        self._segment_bytes = segment_bytes
        self._number = 0
        self._segment = ""
        self._file: int | None = None
        self._written = 0
        self._scratch = np.empty(0, np.uint8)  # reused: fresh memory costs more than the copy

    def write(self, columns: Columns) -> Spooled:
        """Append one group. It can be read as soon as this returns.

        Raises:
            SchemaError: A column cannot be written.
            OSError: The disk refused the write. Nothing of the group is kept, and the next write
                starts a new segment.
        """
        packed = pack(columns, self._scratch)
        if packed.nbytes > self._scratch.nbytes:
            self._scratch = packed
        if self._file is None:
            self._file = self._open_segment()
        offset = self._written
        try:
            self._append(self._file, packed.data)
        except OSError:
            self._give_back(offset)
            raise
        if self._written >= self._segment_bytes:
            self.rotate()
        return Spooled(self._segment, offset, len(packed), read_digest(packed))

    def rotate(self) -> None:
        """Start a new segment for the next writes. The current one may be removed from now on."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open_segment(self) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._number += 1
        self._segment = segment_name(self._producer, self._incarnation, self._number)
        self._written = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        return os.open(self._directory / self._segment, flags, 0o644)

    def _append(self, file: int, packed: memoryview) -> None:
        left = packed
        while left:
            written = os.write(file, left)  # a disk that fills up accepts a part
            left = left[written:]
        self._written += len(packed)

    def _give_back(self, offset: int) -> None:
        """Free the space of a refused group. Remove the segment if it has no other group."""
        with contextlib.suppress(OSError):
            if offset:
                os.truncate(self._directory / self._segment, offset)
            else:
                (self._directory / self._segment).unlink()
        self.rotate()


def read(directory: Path, place: Spooled) -> Columns:
    """Return the columns of a receipt, byte for byte.

    Raises:
        NotInSpool: The segment is missing, cannot be read, or has different content.
    """

    def problem(text: str) -> NotInSpool:
        return NotInSpool(place.segment, place.offset, text)

    if Path(place.segment).name != place.segment:
        raise problem("no name of a segment")
    try:
        with (directory / place.segment).open("rb", buffering=0) as file:
            file.seek(place.offset)
            there = os.fstat(file.fileno()).st_size - place.offset
            # Never allocates more than the file has, even for a wrong receipt
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
    if read_digest(packed) != place.digest:
        raise problem("a different group than the receipt's")
    return columns


def sweep(directory: Path, keep: Container[str] = ()) -> int:
    """Remove the segments that are not in ``keep``, ignoring failures. Return their number."""
    removed = 0
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        if path.name not in keep:
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    with contextlib.suppress(OSError):  # not empty, or missing
        directory.rmdir()
    return removed
