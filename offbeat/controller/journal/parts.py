"""Reads a journal in parts: the sums of each part from its aggregates, and its events on request.

A part lies between two snapshots. Its aggregates have some kilobytes, its events megabytes. If a
file of aggregates is missing or damaged, the events of that part are read instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from offbeat.controller.events import AnyEvent
from offbeat.controller.journal.frames import AGGREGATES, JournalCorrupt
from offbeat.controller.journal.reading import (
    BAD_FILE,
    JournalSegment,
    aggregates_path,
    chain_to,
    fold,
    newest_snapshot,
    read_beside,
    snapshot_before,
)
from offbeat.controller.ledger import Ledger
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import BINS, STEP_FIELDS, Aggregates, RunTotals

_ROW_BYTES: Final = 8 * len(STEP_FIELDS)
_STALENESS_BYTES: Final = 8 * 3


@dataclass(frozen=True, slots=True)
class JournalPart:
    """The records between two snapshots."""

    aggregates: Aggregates
    before: int  # the first segment after it
    first_record: int  # number of its first record in the journal, from 1


@dataclass(frozen=True, slots=True)
class JournalState:
    """State from which the events of a part continue."""

    ledger: Ledger
    driver: str = ""  # of the last incarnation


@dataclass(frozen=True, slots=True)
class JournalParts:
    """A whole journal at one moment. The run may still be writing it."""

    directory: Path
    parts: list[JournalPart]  # oldest first, without a gap; empty only if there are no segments
    ledger: Ledger
    totals: RunTotals
    problems: list[str] = field(default_factory=list[str])
    """One sentence for each damaged or missing file whose content was read from other files."""

    _segments: list[JournalSegment] = field(default_factory=list[JournalSegment])

    def events(self, first: int, last: int) -> Iterator[tuple[int, AnyEvent]]:
        """Yield the events of the parts ``first`` to ``last``, counted from 1.

        Raises:
            JournalCorrupt: A segment is damaged.
        """
        number = self.parts[first].first_record
        begin, before = self.parts[first].aggregates.first_segment, self.parts[last].before
        for segment in self._segments:
            if begin <= segment.number < before:
                for event, _ in segment.events():
                    yield number, event
                    number += 1

    def state_before(self, part: int) -> JournalState | None:
        """Return the state before the first record of a part, or None if no snapshot has it."""
        if part == 0:
            return JournalState(Ledger())
        saved = snapshot_before(self.directory, self.parts[part].aggregates.first_segment)
        if saved is None:
            return None
        return JournalState(Ledger.fold((), saved.table), saved.history.driver or "")


def read_parts(directory: Path) -> JournalParts:
    """Read the sums of a journal: its aggregates, and the records since the last aggregates.

    Raises:
        JournalCorrupt: A segment that had to be read is damaged, or one is missing.
        JournalVersion: A different version of offbeat wrote it.
        FileNotFoundError: The directory does not exist.
    """
    folded = fold(directory)
    if not folded.segment:
        return JournalParts(directory, [], folded.ledger, folded.stats.totals)
    segments = chain_to(directory, folded.segment)
    # Records that a live run appends after this moment are not read.
    segments[-1] = replace(segments[-1], limit=folded.segment_bytes)
    begun = segments[0].number
    problems = list[str]()
    found = [(folded.stats.end_part(folded.first_segment), segments[-1].number + 1)]
    before = folded.first_segment
    while before > begun:
        try:
            part = _read_aggregates(directory, before)
        except (OSError, *BAD_FILE) as error:
            part = _recount(directory, segments, before)
            problems.append(
                f"{aggregates_path(directory, before).name} cannot be read ({error}): "
                f"segments {part.first_segment} to {before - 1} were read in its place"
            )
        found.append((part, before))
        before = part.first_segment
    parts, number = list[JournalPart](), 1
    for part, end in reversed(found):
        parts.append(JournalPart(part, end, number))
        number += part.records
    return JournalParts(directory, parts, folded.ledger, folded.stats.totals, problems, segments)


def differing_aggregates(directory: Path) -> Iterator[str]:
    """Yield a sentence on each file of aggregates that disagrees with its records.

    Reads every record once. Raises the errors of ``read_parts``.
    """
    read = read_parts(directory)
    yield from read.problems
    recount = RunStats()
    for number, part in enumerate(read.parts):
        for _, event in read.events(number, number):
            recount.add(event)
        first = part.aggregates.first_segment
        counted = recount.end_part(first)
        for name in Aggregates.__struct_fields__:
            if getattr(counted, name) != getattr(part.aggregates, name):
                file = aggregates_path(directory, part.before).name
                yield f"{file}: {name} is not what segments {first} to {part.before - 1} add up to"


def _read_aggregates(directory: Path, number: int) -> Aggregates:
    """Read a file of aggregates.

    Raises:
        JournalCorrupt: The file is damaged, belongs to another journal, or its columns do not fit
            each other.
        JournalVersion: A different version of offbeat wrote it.
        msgspec.DecodeError: The file contains something else.
        OSError: The file cannot be read or does not exist.
    """
    path = aggregates_path(directory, number)
    payload = read_beside(directory, number, path, AGGREGATES)
    part = msgspec.msgpack.decode(payload, type=Aggregates)
    bins = [part.trainer_busy, part.sync_busy]
    for each in (part.engine_busy, part.trainer_s, part.engine_s):
        bins += each.values()
    fits = (
        0 < part.first_segment < number
        and len(part.steps) % _ROW_BYTES == 0
        and len(part.staleness) % _STALENESS_BYTES == 0
        and all(len(each) in {0, 4 * BINS} for each in bins)
    )
    if not fits:
        raise JournalCorrupt(str(path), 0, "its columns do not fit each other")
    return part


def _recount(directory: Path, segments: list[JournalSegment], before: int) -> Aggregates:
    """Return the sums over the records from the last readable snapshot up to a segment."""
    first, saved = newest_snapshot(directory, before - 1)
    recount = RunStats(carried=None if saved is None else saved.aggregates)
    for segment in segments:
        if first <= segment.number < before:
            for event, _ in segment.events():
                recount.add(event)
    return recount.end_part(first)
