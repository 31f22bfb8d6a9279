"""Reads a journal: all its events, or the resulting state.

Segments are chained. The header of each names the segment before it and how many bytes of that
segment count. This gives a total order, even if a replaced controller kept writing. Readers use no
lock. If the journal is being written, they get its state of a moment ago.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from offbeat.controller.events import AnyEvent, Event, Rewound, StepApplied
from offbeat.controller.group_table import TableSnapshot
from offbeat.controller.journal.frames import (
    HEADER_BYTES,
    SEGMENT,
    SNAPSHOT,
    JournalCorrupt,
    JournalVersion,
    SegmentHeader,
    frames,
    parse_header,
)
from offbeat.controller.journal.legality import contradiction
from offbeat.controller.ledger import Ledger, StepsAfter, steps_after
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import CarriedState, RunTotals
from offbeat.run_files.limits import JOURNAL_FILE_BYTES, FileTooLarge, NoRegularFile, read_limited

log = structlog.stdlib.get_logger()

_ARRAY_16: Final = 0xDC  # MessagePack's array of more than 15 fields, with a header of 3 bytes
_KIND_BYTES: Final = 32  # exceeds the header of an array and the longest name of a kind
BAD_FILE: Final = (
    *(JournalCorrupt, JournalVersion, FileTooLarge, NoRegularFile, RecursionError),
    ValueError,  # msgspec's is one
)
"""Errors from reading a file next to a segment, except errors of the disk."""
_NAME: Final = re.compile(r"(events|snapshot|aggregates)-(\d{6,})\.bin")


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of segment ``number``. Snapshot ``number`` is the state before it."""
    return directory / f"events-{number:06d}.bin"


def snapshot_path(directory: Path, number: int) -> Path:
    """Return the path of the snapshot of the state before segment ``number``."""
    return directory / f"snapshot-{number:06d}.bin"


def aggregates_path(directory: Path, number: int) -> Path:
    """Return the path of the sums over the records between the previous snapshot and this one."""
    return directory / f"aggregates-{number:06d}.bin"


def numbers(directory: Path, kind: str) -> list[int]:
    """Return the numbers of all files of a kind, such as ``events``, in ascending order."""
    named = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(name[2]) for name in named if name and name[1] == kind)


def read_journal(directory: Path) -> Iterator[AnyEvent]:
    """Yield every event of the run, oldest first, over all incarnations of its controller.

    A record torn by a crash at the end of a segment is skipped: no barrier has confirmed it.

    Raises:
        JournalCorrupt: A file is damaged, or missing.
        JournalVersion: A different version of offbeat wrote it.
        FileNotFoundError: The directory does not exist.
    """
    last = _newest(directory, numbers(directory, "events"))
    for part in _chain(directory, last, first=1):
        for event, _ in part.events():
            yield event


def recover(directory: Path) -> Ledger:
    """Return the ledger that results from the newest good snapshot and the events after it.

    The ledger does not record to a journal. The directory may be empty.

    Raises:
        JournalCorrupt: A file is damaged, or missing.
        JournalVersion: A different version of offbeat wrote it.
        FileNotFoundError: The directory does not exist.
    """
    return fold(directory).ledger


def recover_with_totals(directory: Path) -> tuple[Ledger, RunTotals]:
    """Return the ledger as ``recover`` does, and the times and rates of all incarnations so far.

    Raises the errors of ``recover``.
    """
    folded = fold(directory)
    return folded.ledger, folded.stats.totals


def find_steps_after(directory: Path, version: int) -> StepsAfter:
    """Find the steps that a rewind to ``version`` undoes, reading back from the last segment.

    Raises the errors of ``read_journal``.
    """
    return steps_after(version, _steps_newest_first(directory))


class SavedState(msgspec.Struct, frozen=True):
    """Content of a snapshot file: the state that results from all records before it."""

    table: TableSnapshot
    history: RunTotals
    aggregates: CarriedState


@dataclass(frozen=True, slots=True)
class FoldedJournal:
    """State that results from a journal, and the position in its files where that state ends."""

    ledger: Ledger
    stats: RunStats  # its part begins at the snapshot that was read
    first_segment: int = 1  # the one after that snapshot
    segment: int = 0  # the last one; 0: there is none
    segment_bytes: int = 0  # of it that count
    records: int = 0  # since the last snapshot


def fold(directory: Path, before: int | None = None) -> FoldedJournal:
    """Return the state that ``recover`` returns, and the position in the files where it ends.

    Segments from ``before`` on are ignored. Raises the errors of ``recover``.
    """
    segments = [n for n in numbers(directory, "events") if before is None or n < before]
    last = _newest(directory, segments)
    if last is None:
        return FoldedJournal(Ledger(), RunStats())
    first, saved = newest_snapshot(directory, last.number)
    ledger = Ledger.fold((), None if saved is None else saved.table)
    stats = RunStats() if saved is None else RunStats(saved.history, saved.aggregates)
    records, end = 0, HEADER_BYTES
    for part in _chain(directory, last, first):
        end = HEADER_BYTES
        for event, frame_end in part.events():
            problem = contradiction(ledger, event)
            if problem is not None:
                found = f"{type(event).__name__} cannot follow: {problem}"
                raise JournalCorrupt(str(part.path), end, found)
            ledger.apply(event)
            stats.add(event)
            records, end = records + 1, frame_end
    return FoldedJournal(ledger, stats, first, last.number, end, records)


@dataclass(frozen=True, slots=True)
class JournalSegment:
    """One segment, up to the byte at which the next one began."""

    number: int
    path: Path
    header: SegmentHeader
    limit: int | None = None  # bytes of it that the next one follows; None: it is the last one

    def events(self, kinds: tuple[bytes, ...] = ()) -> Iterator[tuple[AnyEvent, int]]:
        """Yield the events, each with the offset at which its frame ends.

        ``kinds`` selects events by the bytes that ``_kind`` returns. Without it, yield all events.
        """
        decode = msgspec.msgpack.Decoder(AnyEvent).decode
        for payload, end in frames(
            str(self.path), read_limited(self.path, JOURNAL_FILE_BYTES), self.limit
        ):
            if kinds and not _is_any(payload, kinds):
                continue
            try:
                event = decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                start = end - len(payload)
                raise JournalCorrupt(str(self.path), start, f"no record: {error}") from error
            yield event, end


def _kind(event: type[Event]) -> bytes:
    """Return the bytes that name the kind of a record. They follow the header of its array."""
    return msgspec.msgpack.encode(event.__name__)


def _is_any(payload: memoryview, kinds: tuple[bytes, ...]) -> bool:
    head = bytes(payload[:_KIND_BYTES])
    return head.startswith(kinds, 3 if payload[0] == _ARRAY_16 else 1)


_STEP_KINDS: Final = (_kind(StepApplied), _kind(Rewound))


def _steps_newest_first(directory: Path) -> Iterator[AnyEvent]:
    """Yield the steps and rewinds of a journal, newest first. Read a segment when it is reached."""
    part = _newest(directory, numbers(directory, "events"))
    while part is not None:
        for event, _ in reversed(list(part.events(_STEP_KINDS))):
            yield event
        part = _former(directory, part)


def _newest(directory: Path, segments: list[int]) -> JournalSegment | None:
    """Return the last segment with a header. A crash may leave a segment without one."""
    for number in reversed(segments):
        part = _begun(directory, number)
        if part is not None:
            return part
    return None


def _chain(directory: Path, last: JournalSegment | None, first: int) -> list[JournalSegment]:
    """Return the journal's segments from ``first`` on, oldest first."""
    parts = [] if last is None else [last]
    while parts and parts[-1].header.follows >= first:
        former = _former(directory, parts[-1])
        if former is not None:
            parts.append(former)
    return parts[::-1]


def _former(directory: Path, follower: JournalSegment) -> JournalSegment | None:
    """Return the segment before this one, up to its last valid byte, or None for the first."""
    if not follower.header.follows:
        return None
    former = _begun(directory, *follower.header)
    if former is None:
        path = segment_path(directory, follower.header.follows)
        problem = f"it is missing or empty, but {follower.path.name} follows it"
        raise JournalCorrupt(str(path), 0, problem)
    return former


def _begun(directory: Path, number: int, limit: int | None = None) -> JournalSegment | None:
    path = segment_path(directory, number)
    if not path.exists():
        return None
    with path.open("rb") as file:
        header = parse_header(str(path), file.read(HEADER_BYTES + 1), SEGMENT)
    if header is None:
        return None
    if header.follows >= number:  # a reader of a circle would never end
        problem = f"it says that it follows segment {header.follows}, which is not before it"
        raise JournalCorrupt(str(path), 0, problem)
    return JournalSegment(number, path, header, limit)


def newest_snapshot(directory: Path, at_most: int) -> tuple[int, SavedState | None]:
    """Return the newest good snapshot and the number of the segment that continues it.

    Returns 1 and None if there is no good snapshot.
    """
    for number in reversed(numbers(directory, "snapshot")):
        if number <= at_most:
            path = snapshot_path(directory, number)
            try:
                return number, _read_snapshot(directory, number)
            except BAD_FILE as error:
                # An older snapshot and more events give the same state.
                log.warning("journal.snapshot_skipped", file=str(path), error=str(error))
    return 1, None


def _read_snapshot(directory: Path, number: int) -> SavedState:
    payload = read_beside(directory, number, snapshot_path(directory, number), SNAPSHOT)
    return msgspec.msgpack.decode(payload, type=SavedState)


def read_beside(directory: Path, number: int, path: Path, kind: bytes) -> memoryview:
    """Return the payload of the one-frame file that was written next to segment ``number``.

    Raises:
        JournalCorrupt: The file is damaged, or belongs to another journal.
        JournalVersion: A different version of offbeat wrote it.
        OSError: The file cannot be read.
    """
    data = read_limited(path, JOURNAL_FILE_BYTES)
    found = parse_header(str(path), data, kind)
    if found is None:
        raise JournalCorrupt(str(path), 0, "it is empty")
    segment = _begun(directory, number)
    if segment is None or found != segment.header:
        problem = (
            f"it does not belong to the same journal as {segment_path(directory, number).name}"
        )
        raise JournalCorrupt(str(path), 0, problem)
    payload = next((payload for payload, _ in frames(str(path), data, len(data))), None)
    if payload is None:
        raise JournalCorrupt(str(path), HEADER_BYTES, "it ends here")
    return payload


def snapshot_before(directory: Path, number: int) -> SavedState | None:
    """Return the state before a segment, or None if its snapshot is missing or damaged."""
    try:
        return _read_snapshot(directory, number)
    except (OSError, *BAD_FILE):
        return None


def chain_to(directory: Path, number: int) -> list[JournalSegment]:
    """Return the journal's segments up to this one, oldest first.

    Raises:
        JournalCorrupt: A segment is missing.
    """
    return _chain(directory, _newest(directory, [number]), first=1)
