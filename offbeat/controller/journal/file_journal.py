"""The ledger's events on disk: appended on the event loop, written and fsynced off it.

    append, snapshot -> queue -> sync, one at a time, in a thread -> events-000001.bin
    barrier          -> waiters <- its end                           aggregates-000002.bin
                                                                     snapshot-000002.bin
                                                                     events-000002.bin ...

``barrier`` waits for the end of a sync that began after the call. One sync serves all barriers that
wait when the sync begins. Without barriers a sync begins when ``FLUSH_BYTES`` are queued. Lower
layers: ``reading``, ``files``, ``frames``.

Also writes the journal's files: segments of events, and snapshots between them. This blocks, and
works in any thread.

A writer claims a segment by creating the file with the next free number. After each fsync it looks
for a successor. A successor that claimed its segment before the fsync has not seen the new records;
a later successor reads them. So if two controllers write, the later one continues, and the barrier
of the other one fails.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Self

import msgspec
import structlog

from offbeat.controller.events import Event
from offbeat.controller.group_table import GroupTable
from offbeat.controller.journal.frames import (
    AGGREGATES,
    SEGMENT,
    SNAPSHOT,
    JournalFailed,
    JournalRemoved,
    JournalTaken,
    frame,
    header,
)
from offbeat.controller.journal.reading import (
    FoldedJournal,
    SavedState,
    aggregates_path,
    find_steps_after,
    fold,
    numbers,
    segment_path,
    snapshot_path,
)
from offbeat.controller.ledger import Ledger, StepsAfter
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import Aggregates
from offbeat.run_files.disk import DISK, Disk

log = structlog.stdlib.get_logger()
_UNFINISHED = ".tmp"


@dataclass(frozen=True, slots=True)
class Rotation:
    """Point in the queue at which a new segment begins, and the state before that segment."""

    snapshot: bytes  # encoded
    aggregates: Aggregates  # of the records since the rotation before; their segment is not known


class Segments:
    """The journal files that one incarnation of a controller writes.

    One thread puts encoded records and rotations into ``queue``. ``sync`` removes and writes them
    in order, in any thread. After a failure nothing is written any more.
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

        The segment is claimed before the others are read. From the claim on, no barrier of a former
        incarnation succeeds.

        Raises:
            JournalTaken: Another controller began at the same moment.
            JournalFailed: The disk refused an operation.
            JournalCorrupt: An earlier file cannot be read.
            JournalVersion: A different version of offbeat wrote it.
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
        """Write and fsync the queued records and rotations.

        Return how many records of this incarnation are durable.

        Args:
            patience_s: Maximum wait for a sync in another thread. If that sync has not ended by
                then, nothing is done. -1 waits without a limit.

        Raises:
            JournalFailed: The disk refused. The file's content is unknown, so later calls raise
                too.
            JournalTaken: Another controller has begun. Later calls raise too.
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
        except Exception as error:  # of any kind: removed records may not be on disk
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
        if not own.exists():  # an open file without a name still exists
            raise JournalRemoved(str(own), "no record of it can be read any more")
        self._durable += len(records)

    def _append(self, data: bytes) -> None:
        self._disk.append(self._file, data)
        self._disk.sync_appended(self._file)
        self._size += len(data)

    def _rotate(self, rotation: Rotation) -> None:
        """Make this segment durable, then switch to the next segment.

        After a crash before the end of this call, readers use the older snapshot.
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
            # The aggregates are first, so every readable snapshot has its aggregates.
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
        """Write a file of one frame completely, or leave no file under this name."""
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
            ):  # the first error is reported; a leftover file only uses space
                self._disk.remove(unfinished)
            raise
        self._disk.sync(self.directory)


def _claim(disk: Disk, directory: Path, number: int) -> int:
    path = segment_path(directory, number)
    try:
        return disk.create(path)
    except FileExistsError:
        raise JournalTaken(str(path)) from None


_PER_GROUP: Final = 4  # records for each group outstanding: a snapshot costs as much as they do,
_CHEAP: Final = 1000  # and one of so many groups, about a millisecond of the loop
FLUSH_BYTES: Final = 256 * 1024
_PATIENCE_S: Final = 0.7  # with a sync under way, twice; an abnormal end has two seconds

RunBlocking = Callable[[Callable[[], int]], Awaitable[int]]
"""Runs a function that blocks, off the event loop: ``partial(loop.run_in_executor, None)``."""


def open_journal(
    directory: Path,
    run_blocking: RunBlocking,
    *,
    snapshot_records: int,
    disk: Disk = DISK,
    unix_s: Callable[[], float] = float,
) -> tuple[Ledger, "FileJournal"]:
    """Start a new incarnation. Return the state so far and the journal that continues it.

    The journal records every event of the ledger. From here on no barrier of a former
    incarnation's journal succeeds. Blocks until all earlier records are read.

    Args:
        directory: Directory of the journal, created if missing.
        run_blocking: Runs a blocking function off the event loop.
        snapshot_records: Events between two snapshots.
        disk: Disk operations.
        unix_s: Clock for the time stamps of events. Without a clock, events have no time stamps.

    Raises:
        JournalTaken: Another controller began at the same moment.
        JournalFailed: The disk refused an operation.
        JournalCorrupt: An existing file is damaged.
        JournalVersion: A different version of offbeat wrote it.
    """
    segments, folded = Segments.begin(directory, disk)
    ledger = folded.ledger
    journal = FileJournal(
        segments,
        ledger,
        run_blocking,
        stats=folded.stats,
        snapshot_records=snapshot_records,
        records=folded.records,
        unix_s=unix_s,
    )
    ledger.record = journal.append
    return ledger, journal


class FileJournal:
    """Journal of one incarnation: records its events in order. Created by ``open_journal``.

    Events before a completed ``barrier`` survive any crash. Of the later events, some may survive:
    the first ones, without a gap. Once the disk has refused a write, ``failure`` is set and every
    barrier raises it.
    """

    def __init__(
        self,
        segments: Segments,
        table: GroupTable,
        run_blocking: RunBlocking,
        *,
        stats: RunStats,
        snapshot_records: int,
        records: int,
        unix_s: Callable[[], float],
    ) -> None:
        """Create the journal of ``table``. The table must apply every event before it is appended.

        Each event is added to ``stats``, which include the former incarnations. Snapshots store
        these figures.
        """
        self._segments, self._table, self._run_blocking = segments, table, run_blocking
        self.stats = stats
        self._snapshot_records, self._records = snapshot_records, records
        self._unix_s = unix_s
        self._encode = msgspec.msgpack.Encoder().encode
        self._put = segments.queue.append
        self._queued_bytes = 0  # since a sync began
        self._appended = self._durable = 0  # events
        self._sync: asyncio.Future[int] | None = None  # the one under way
        self._waiters = deque[tuple[int, asyncio.Future[None]]]()  # with what must be durable
        self.failure: JournalFailed | JournalTaken | None = None

    def append(self, event: Event) -> None:
        """Queue an event for writing. Needs microseconds, however slow the disk is."""
        event = msgspec.structs.replace(event, unix_s=self._unix_s())
        self.stats.add(event)
        payload = self._encode(event)
        self._put(payload)
        self._appended += 1
        self._records += 1
        self._queued_bytes += len(payload)
        outstanding = len(self._table.groups) - _CHEAP
        if self._records >= max(self._snapshot_records, _PER_GROUP * outstanding):
            self.snapshot()
        elif self._queued_bytes >= FLUSH_BYTES:
            self._begin_sync()

    async def barrier(self) -> None:
        """Wait until all events appended so far would survive a crash.

        Raises:
            JournalFailed: The disk refused a write, now or before.
            JournalTaken: Another controller writes the journal.
        """
        if self.failure is not None:
            raise self.failure
        if self._durable == self._appended:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._appended, waiter))
        self._begin_sync()
        await waiter

    async def steps_after(self, version: int) -> StepsAfter:
        """Find the steps that a rewind to ``version`` undoes, off the event loop.

        Reads the segments backwards, from the last one to the step after that version.

        Raises:
            JournalFailed: The disk refused a read.
            JournalTaken: Another controller writes the journal.
            JournalCorrupt: A segment is damaged.
        """
        await self.barrier()
        found = StepsAfter((), ())

        def read() -> int:
            nonlocal found
            found = find_steps_after(self._segments.directory, version)
            return len(found.undone)

        try:
            await self._run_blocking(read)
        except OSError as error:
            raise JournalFailed(str(self._segments.directory), str(error)) from error
        return found

    def snapshot(self) -> None:
        """Start a new segment after a snapshot of the state. Also called automatically.

        Encodes the group table now, at a cost linear in the number of outstanding groups.
        """
        self._records = 0
        if self.failure is None:
            aggregates = self.stats.end_part()
            state = SavedState(self._table.snapshot(), self.stats.totals, self.stats.carried)
            self._put(Rotation(self._encode(state), aggregates))
            self._begin_sync()

    def flush_now(self, patience_s: float = _PATIENCE_S) -> bool:
        """Write and fsync on this thread before the process ends. Return whether all is durable.

        It raises nothing. If it returns False, ``failure`` holds the reason, or None if another
        thread was still writing after ``patience_s``. The disk determines how long the write takes.
        """
        try:
            self._settle(self._segments.sync(patience_s))
        except (JournalFailed, JournalTaken) as failure:
            self._fail(failure)
        return self.failure is None and self._durable == self._appended

    def close(self, patience_s: float = _PATIENCE_S) -> bool:
        """Flush like ``flush_now`` and close the file.

        Events appended later are lost, with a log line.
        """
        durable = self.flush_now(patience_s)
        self._segments.close(patience_s)
        return durable

    def _begin_sync(self) -> None:
        """Start a sync unless one is running. The end of a running sync starts the next."""
        if self._sync is None and self.failure is None:
            self._queued_bytes = 0
            self._sync = asyncio.ensure_future(self._run_blocking(self._segments.sync))
            self._sync.add_done_callback(self._sync_ended)

    def _sync_ended(self, sync: asyncio.Future[int]) -> None:
        self._sync = None
        error = asyncio.CancelledError() if sync.cancelled() else sync.exception()
        if error is None:
            self._settle(sync.result())
        elif isinstance(error, JournalFailed | JournalTaken):
            self._fail(error)
        else:  # not the disk, but the written content is unknown too
            self._fail(JournalFailed("sync", repr(error)))
        if self._waiters or self._queued_bytes >= FLUSH_BYTES:
            self._begin_sync()

    def _settle(self, durable: int) -> None:
        self._durable = max(self._durable, durable)
        while self._waiters and self._waiters[0][0] <= self._durable:
            _, waiter = self._waiters.popleft()
            if not waiter.done():  # cancelled
                waiter.set_result(None)

    def _fail(self, failure: JournalFailed | JournalTaken) -> None:
        self.failure = failure
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(failure)
