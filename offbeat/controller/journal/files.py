"""Writes a journal's files: segments of events, snapshots between them. Blocking; any thread.

A segment is claimed by creating it, its number the next free one. After each fsync a writer looks
for a successor: one that claimed before has not seen what was written, one that claims later reads
it. So of two controllers the one that began last goes on, and the other's barrier fails.
"""

import contextlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

import msgspec
import structlog

from offbeat.controller.journal.errors import JournalFailed, JournalRemoved, JournalTaken
from offbeat.controller.journal.frames import AGGREGATES, SEGMENT, SNAPSHOT, frame, header
from offbeat.controller.journal.reading import (
    FoldedJournal,
    aggregates_path,
    fold,
    numbers,
    segment_path,
    snapshot_path,
)
from offbeat.controller.stats_records import Aggregates
from offbeat.run_files.disk import Disk

log = structlog.stdlib.get_logger()
_UNFINISHED = ".tmp"


@dataclass(frozen=True, slots=True)
class Rotation:
    """Point in the queue at which a new segment begins, with the state up to it."""

    snapshot: bytes  # encoded
    aggregates: Aggregates  # of the records since the rotation before; their segment is not known


class Segments:
    """The journal files that one incarnation of a controller writes.

    Encoded records and rotations are put into ``queue`` by one thread; ``sync`` takes them out, in
    order, in any thread. After a failure nothing is written any more.
    """

    def __init__(self, directory: Path, disk: Disk, number: int, file: int) -> None:
        self.directory, self._disk = directory, disk
        self._number, self._file = number, file
        self._aggregated_from = number  # segment with the first record since the last rotation
        self._size = 0  # of the segment, bytes
        self._durable = 0  # records
        self._failure: JournalFailed | JournalTaken | None = None
        self._closed = False
        self._lock = Lock()
        self.queue = deque[bytes | Rotation]()

    @classmethod
    def begin(cls, directory: Path, disk: Disk) -> tuple[Self, FoldedJournal]:
        """Begin a new incarnation: return its own segment and the state before it.

        The segment is claimed first and the others are read then: from here on no barrier of a
        former incarnation succeeds.

        Raises:
            JournalTaken: Another controller began at the same moment.
            JournalFailed: The disk.
            JournalCorrupt: What came before cannot be read.
            JournalVersion: Another version of offbeat wrote it.
        """
        try:
            if not directory.exists():
                directory.mkdir(parents=True)
                disk.sync(directory.parent)
            for left_over in directory.glob(f"*{_UNFINISHED}"):
                disk.remove(left_over)
            number = max(numbers(directory, "events"), default=0) + 1
            segments = cls(directory, disk, number, _claim(disk, directory, number))
            try:
                folded = fold(directory, before=number)
                if folded.segment:  # a process that was killed may not have come to its fsync
                    disk.sync(segment_path(directory, folded.segment))
                segments._begin_segment(folded.segment, folded.segment_bytes)
                if folded.segment:
                    segments._aggregated_from = folded.first_segment
            except BaseException:
                segments.close()
                disk.remove(segment_path(directory, number))
                raise
        except OSError as error:
            raise JournalFailed(str(directory), str(error)) from error
        return segments, folded

    def sync(self, patience_s: float = -1) -> int:
        """Write and fsync what is queued now.

        Return how many records of this incarnation are durable.

        Args:
            patience_s: How long to wait for another thread that is at it, then do nothing; -1: as
                long as it takes.

        Raises:
            JournalFailed: The disk refused. What it holds is not known, so every later call raises.
            JournalTaken: Another controller has begun. The same.
        """
        if not self._lock.acquire(timeout=patience_s):
            return self._durable
        try:
            return self._sync()
        finally:
            self._lock.release()

    def close(self, patience_s: float = -1) -> None:
        """Close the file, unless another thread is still writing to it after ``patience_s``."""
        if not self._lock.acquire(timeout=patience_s):
            return
        try:
            if not self._closed:
                self._closed = True
                self._disk.close(self._file)
        finally:
            self._lock.release()

    def _sync(self) -> int:
        if self._failure is not None:
            raise self._failure
        if not self.queue:
            return self._durable
        path = segment_path(self.directory, self._number)
        try:
            if self._closed:
                raise JournalFailed(str(path), "it was closed before")  # noqa: TRY301
            self._take(len(self.queue))
        except (JournalFailed, JournalTaken) as failure:
            self._failure = failure
            raise
        except Exception as error:  # whatever it was: what was taken may not be on disk
            self._failure = JournalFailed(str(path), str(error))
            raise self._failure from error
        return self._durable

    def _take(self, items: int) -> None:
        records = list[bytes]()
        for _ in range(items):
            item = self.queue.popleft()
            if isinstance(item, Rotation):
                self._write(records)
                records.clear()
                self._rotate(item)
            else:
                records.append(item)
        self._write(records)

    def _write(self, records: list[bytes]) -> None:
        if not records:
            return
        self._append(b"".join(map(frame, records)))
        successor = segment_path(self.directory, self._number + 1)
        if successor.exists():
            raise JournalTaken(str(successor))
        own = segment_path(self.directory, self._number)
        if not own.exists():  # the file system keeps what is open, without a name
            raise JournalRemoved(str(own), "no record of it can be read any more")
        self._durable += len(records)

    def _append(self, data: bytes) -> None:
        self._disk.append(self._file, data)
        self._disk.sync_appended(self._file)
        self._size += len(data)

    def _rotate(self, rotation: Rotation) -> None:
        """Switch to the next segment once all of this one is durable.

        A crash from here on finds the older snapshot.
        """
        follows, follows_bytes = self._number, self._size
        file = _claim(self._disk, self.directory, follows + 1)
        former, self._file = self._file, file
        self._number, self._size = follows + 1, 0
        self._disk.close(former)
        self._begin_segment(follows, follows_bytes)
        try:
            first = self._aggregated_from
            aggregates = msgspec.structs.replace(rotation.aggregates, first_segment=first)
            self._aggregated_from = self._number
            # The aggregates are first: wherever a reader finds a snapshot, it finds them.
            path = aggregates_path(self.directory, self._number)
            head = header(AGGREGATES, follows, follows_bytes)
            self._write_whole(path, head, msgspec.msgpack.encode(aggregates))
            path = snapshot_path(self.directory, self._number)
            self._write_whole(path, header(SNAPSHOT, follows, follows_bytes), rotation.snapshot)
        except OSError as error:
            # All segments are kept: the next incarnation only reads more of them.
            log.warning("journal.snapshot_failed", segment=self._number, error=str(error))

    def _begin_segment(self, follows: int, follows_bytes: int) -> None:
        self._append(header(SEGMENT, follows, follows_bytes))
        self._disk.sync(self.directory)

    def _write_whole(self, final: Path, head: bytes, payload: bytes) -> None:
        """Write a file of one frame, or none under this name."""
        unfinished = final.with_name(final.name + _UNFINISHED)
        file = self._disk.create(unfinished)
        try:
            try:
                self._disk.append(file, head + frame(payload))
                self._disk.sync_appended(file)
            finally:
                self._disk.close(file)
            self._disk.rename(unfinished, final)
        except OSError:
            with contextlib.suppress(
                OSError
            ):  # the first error is reported; a leftover file only takes room
                self._disk.remove(unfinished)
            raise
        self._disk.sync(self.directory)


def _claim(disk: Disk, directory: Path, number: int) -> int:
    path = segment_path(directory, number)
    try:
        return disk.create(path)
    except FileExistsError:
        raise JournalTaken(str(path)) from None
