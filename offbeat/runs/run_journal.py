"""The journal of a run for its readers: page, ``watch``, ``export``, ``why``.

Totals of the run are read from the aggregates next to the snapshots. Events are read only from
stretches (successive parts) that a reader requests. So all readers agree, and the cost hardly grows
with the run.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from offbeat.controller.events import AnyEvent
from offbeat.controller.journal import JournalParts, JournalState, read_parts
from offbeat.controller.ledger import Ledger
from offbeat.controller.stats_records import Aggregates
from offbeat.runs.past_run import check_events, find_journal


class RunJournal:
    """The journal of a run, read once. For a live run it shows the state at that moment."""

    def __init__(self, run_dir: Path) -> None:
        """Read the aggregates, the newest snapshot, and the events since that snapshot.

        Raises:
            NotARun: The journal is missing.
            NoRegularFile: A name in it is not a regular file.
            JournalCorrupt: A segment that had to be read is damaged.
            JournalVersion: A different version of offbeat wrote it.
        """
        journal = find_journal(run_dir)
        self._read: JournalParts = read_parts(journal)
        self.ledger, self.totals = self._read.ledger, self._read.totals
        self.problems = self._read.problems
        """One sentence for each damaged file whose content was read from other files."""
        self.aggregates: list[Aggregates] = [part.aggregates for part in self._read.parts]

    @property
    def began_unix_s(self) -> float:
        """Return the time of the first event, or 0 if the journal has none."""
        return self.aggregates[0].began_unix_s if self.aggregates else 0.0

    def stretches(self, most_records: int) -> list[range]:
        """Return stretches of successive parts, with at most ``most_records`` records in total.

        If all parts fit, one stretch has them all. Otherwise, return the last parts, and some
        stretches at equal distances, the first part included. Each has at least one part, and is as
        long as possible. The order is ascending.
        """
        records = [part.records for part in self.aggregates]
        if sum(records) <= most_records or len(records) <= 1:
            return [range(len(records))] if records else []
        chosen, left = set[int](), most_records // 2
        for position in range(len(records) - 1, -1, -1):
            if chosen and records[position] > left:
                break
            chosen.add(position)
            left -= records[position]
        older = len(records) - len(chosen)
        for place in range(_OLDER_STRETCHES):
            position, left = place * older // _OLDER_STRETCHES, most_records // 8
            while position < older and (left > 0):
                chosen.add(position)
                left -= records[position]
                position += 1
        return _runs(sorted(chosen))

    def events(self, stretch: range, ledger: Ledger) -> Iterator[tuple[int, AnyEvent]]:
        """Yield the numbered events of successive parts, after the ledger has applied them.

        ``ledger`` is the ledger that ``state_before`` returns for the first part.

        Raises:
            JournalCorrupt: A segment is damaged.
            ImpossibleEvent: An event does not fit the earlier events.
        """
        return check_events(self._read.events(stretch.start, stretch.stop - 1), ledger)

    def state_before(self, position: int) -> JournalState | None:
        """Return the state before the first event of a part, or None if no snapshot has it."""
        return self._read.state_before(position)

    def undone_to(self, after: int) -> float:
        """Return the lowest version to which parts after a position rewind, or infinity."""
        found = (each.undone_to for each in self.aggregates[after + 1 :])
        return min((each for each in found if each is not None), default=math.inf)

    def parts_about(self, prompt_index: int) -> range:
        """Return all parts from the first to the last one that may name a group. May be empty."""
        found = [
            position
            for position, part in enumerate(self.aggregates)
            if part.lowest_group <= prompt_index <= part.highest_group
        ]
        return range(found[0], found[-1] + 1) if found else range(0)


_OLDER_STRETCHES: Final = 4


def _runs(positions: list[int]) -> list[range]:
    runs = list[range]()
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs
