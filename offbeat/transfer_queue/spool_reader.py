"""Controller's side of the spool: groups of a lost owner become payloads of this process."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from offbeat.messages.groups import Receipt, group_id
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool import NotInSpool, read, sweep
from offbeat.transfer_queue.spool_holds import Hold, Holds, PassedOver

P = TypeVar("P")
log = structlog.stdlib.get_logger()


class SpoolReader(ABC, Generic[P]):
    """Reads groups that a former controller left on disk, and removes groups no longer needed.

    A group's copy stays on disk as long as its payload handle ``P`` exists. All methods belong to
    one event loop; files are removed in a thread. On a machine that does not see the producers'
    disk nothing is readable, and groups are rolled out again.

    A subclass says how this process owns columns.
    """

    def __init__(self, directory: Path, needed: Iterable[str] = ()) -> None:
        """Open a spool; segments that are not ``needed`` are removed at once."""
        needed = frozenset(needed)
        self._directory = directory
        self._holds = Holds(needed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        sweep(directory, needed)

    @abstractmethod
    def make_payload(self, columns: Columns, hold: Hold) -> P:
        """Return the handle of columns that this process owns from now on; it references ``hold``."""

    @abstractmethod
    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        """Return the given groups, by prompt index, of which a payload is known to be lost."""

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
        """Return a reference that keeps the copy of a group that has just finished."""
        place = receipt.spooled
        if place is None:
            return None
        hold = self._holds.hold(place)
        if unneeded := self._holds.unneeded():
            self._thread.submit(self._remove, unneeded)
        for left in self._holds.passed_over():
            self._thread.submit(self._remove_unnamed, left)
        return hold

    def close(self, needed: Iterable[str]) -> None:
        """Release everything except the segments that the next controller needs. Blocks."""
        self._thread.shutdown()
        sweep(self._directory, set(needed))

    def _remove_unnamed(self, left: PassedOver) -> None:
        """Remove segments that no receipt has named: all their groups were cancelled."""
        files = [path.name for path in self._directory.glob(f"{left.producer}.*")]
        self._remove([name for name in files if left.includes(name)])

    def _remove(self, segments: list[str]) -> None:
        for segment in segments:
            with contextlib.suppress(OSError):  # the next sweep removes it
                (self._directory / segment).unlink(missing_ok=True)
