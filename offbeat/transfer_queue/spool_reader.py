"""Controller's side of the spool: groups of a lost owner become payloads of this process.

References to groups are counted by segment. A segment is removed as a whole, once none of its
groups is referenced and its producer writes to another segment. So disk usage is limited to the
segments with referenced groups, plus one segment per producer. If all groups of a segment were
cancelled before their replies, no receipt ever names the segment. It is found among the files once
its producer is known to write to a later one.
"""

import contextlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from offbeat.messages.groups import Receipt, Spooled, group_id
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool import NotInSpool, parts, read, sweep

_DOTS = 3  # number of dots in the name of a segment


class Hold:
    """Reference that keeps one group on disk as long as it exists. Stored next to the payload."""

    __slots__ = ("_let_go", "_segment")

    def __init__(self, segment: str, let_go: deque[str]) -> None:
        self._segment, self._let_go = segment, let_go

    def __del__(self) -> None:
        self._let_go.append(self._segment)  # atomic: the garbage collector may run in any thread


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Removable segments of a producer: unreferenced, followed by a later one. Thread-safe."""

    producer: str
    incarnation: str
    number: int  # number of the producer's newest known segment
    former_incarnations: frozenset[str]
    needed: frozenset[str]

    def includes(self, segment: str) -> bool:
        """Return whether a file of this name can be removed."""
        if segment in self.needed or segment.count(".") != _DOTS:
            return False
        producer, incarnation, number = parts(segment)
        is_former = incarnation in self.former_incarnations or (
            incarnation == self.incarnation and number < self.number
        )
        return producer == self.producer and is_former


class Holds:
    """Counts references by segment. All methods belong to one thread."""

    def __init__(self, needed: Iterable[str] = ()) -> None:
        """Create the counts. The ``needed`` segments, which a former controller used, are kept."""
        self._counts, self._needed = Counter[str](), frozenset(needed)
        self._incarnations = dict[
            str, set[str]
        ]()  # incarnations by producer that have named a segment
        self._moved = set[str]()  # producers with a new segment since the last call
        self._open: dict[str, str] = {}  # newest segment by producer
        self._let_go = deque[str]()  # segments of dropped references that are not counted yet

    def inherit(self, place: Spooled) -> Hold:
        """Reference a group that a former controller received."""
        self._counts[place.segment] += 1
        return Hold(place.segment, self._let_go)

    def hold(self, place: Spooled) -> Hold:
        """Reference a group that was just written. Its producer may write more to this segment."""
        producer = parts(place.segment)[0]
        before = self._open.get(producer)
        if _is_newer(place.segment, before):
            self._open[producer] = place.segment
            self._incarnations.setdefault(producer, set()).add(parts(place.segment)[1])
            self._moved.add(producer)
            if before is not None:
                self._counts[before] += 1
                # It may have no references, so check it like a released one
                self._let_go.append(before)
        return self.inherit(place)

    def list_unneeded(self) -> list[str]:
        """Return segments that are no longer needed. A late reply can make one appear again."""
        free = list[str]()
        while self._let_go:
            segment = self._let_go.popleft()
            self._counts[segment] -= 1
            if not self._counts[segment] and segment not in self._open.values():
                del self._counts[segment]
                free.append(segment)
        return free

    def list_passed_over(self) -> list[PassedOver]:
        """Return the removable segments of each producer with a new segment since the last call."""
        moved, self._moved = self._moved, set[str]()
        referenced = frozenset(name for name, count in self._counts.items() if count > 0)
        left = list[PassedOver]()
        for producer in sorted(moved):
            _, incarnation, number = parts(self._open[producer])
            former = frozenset(self._incarnations[producer] - {incarnation})
            left.append(
                PassedOver(producer, incarnation, number, former, referenced | self._needed)
            )
        return left


def _is_newer(segment: str, than: str | None) -> bool:
    """Return whether a segment is newer than another segment of the same producer."""
    if than is None:
        return True
    (_, incarnation, number), (_, former_incarnation, former_number) = parts(segment), parts(than)
    return incarnation != former_incarnation or number > former_number


P = TypeVar("P")
log = structlog.stdlib.get_logger()


class SpoolReader(ABC, Generic[P]):
    """Reads groups that a former controller left on disk, and removes groups no longer needed.

    A group's copy stays on disk as long as its payload handle ``P`` exists. All methods belong to
    one event loop. Files are removed in a thread. On a machine that does not see the producers'
    disk, no group can be read, and groups are rolled out again.

    A subclass defines how this process owns columns.
    """

    def __init__(
        self, directory: Path, needed: Iterable[str] = (), *, keeps_all: bool = False
    ) -> None:
        """Open a spool. Segments that are not ``needed`` are removed at once.

        With ``keeps_all``, no segment is ever removed.
        """
        needed = frozenset(needed)
        self._directory, self._keeps_all = directory, keeps_all
        self._holds = Holds(needed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._sweep(needed)

    @abstractmethod
    def make_payload(self, columns: Columns, hold: Hold) -> P:
        """Return the handle of columns that this process owns from now on.

        The handle must reference ``hold``.
        """

    @abstractmethod
    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        """Return the prompt indices of the given groups that are known to have lost a payload."""

    def readable(self, receipt: Receipt) -> P | None:
        """Return the payload of this receipt, now owned by this process, or None if it is lost."""
        place = receipt.spooled
        if place is None:
            return None
        try:
            columns = read(self._directory, place)
        except NotInSpool as gone:
            log.warning("spool.unreadable", group=group_id(receipt.prompt_index), error=str(gone))
            return None
        return self.make_payload(columns, self._holds.inherit(place))

    def hold(self, receipt: Receipt) -> Hold | None:
        """Return a reference that keeps the disk copy of a group that has just finished."""
        place = receipt.spooled
        if place is None or self._keeps_all:
            return None
        hold = self._holds.hold(place)
        if unneeded := self._holds.list_unneeded():
            self._thread.submit(self._remove, unneeded)
        for left in self._holds.list_passed_over():
            self._thread.submit(self._remove_unnamed, left)
        return hold

    def close(self, needed: Iterable[str]) -> None:
        """Remove all segments except the ones that the next controller needs. Blocks."""
        self._thread.shutdown()
        self._sweep(frozenset(needed))

    def _sweep(self, needed: frozenset[str]) -> None:
        if not self._keeps_all:
            sweep(self._directory, needed)

    def _remove_unnamed(self, left: PassedOver) -> None:
        """Remove segments that no receipt has named, because all their groups were cancelled."""
        files = [path.name for path in self._directory.glob(f"{left.producer}.*")]
        self._remove([name for name in files if left.includes(name)])

    def _remove(self, segments: list[str]) -> None:
        for segment in segments:
            with contextlib.suppress(OSError):  # the next sweep removes it
                (self._directory / segment).unlink(missing_ok=True)
