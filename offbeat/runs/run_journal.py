"""The journal of a run as its readers share it: page, ``watch``, ``export``, ``why``.

Totals of the run are read from the aggregates beside the snapshots; events are read from the
stretches that a reader asks for. So all readers agree, at a cost that hardly grows.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from offbeat.controller.events import AnyEvent
from offbeat.controller.journal import JournalParts, JournalState, read_parts
from offbeat.controller.ledger import Ledger
from offbeat.controller.stats_records import Aggregates
from offbeat.runs.past_run import checked, journal_of


class RunJournal:
    """The journal of a run, read once; a run that goes on is read as it was at that moment."""

    def __init__(self, run_dir: Path) -> None:
        """Read aggregates, the newest snapshot and the events since.

        Raises:
            NotARun: There is no journal.
            NoRegularFile: A name in it belongs to no regular file.
            JournalCorrupt: A segment that had to be read is damaged.
            JournalVersion: Another version of offbeat wrote it.
        """
        journal = journal_of(run_dir)
        self._read: JournalParts = read_parts(journal)
        self.ledger, self.totals = self._read.ledger, self._read.totals
        self.problems = self._read.problems
        """Damaged files that others made up for, one sentence each."""
        self.aggregates: list[Aggregates] = [part.aggregates for part in self._read.parts]

    @property
    def began_unix_s(self) -> float:
        """Return the time of the first event; 0 if there is none."""
        return self.aggregates[0].began_unix_s if self.aggregates else 0.0

    def stretches(self, most_records: int) -> list[range]:
        """Return positions of successive parts that have at most so many records in all.

        All parts if they fit, else the last ones and some at equal distances, the first among them;
        at least one part each. Ascending, each stretch as long as can be.
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
        """Yield the events of successive parts with their numbers, once the ledger has applied them.

        ``ledger`` is that of ``state_before`` the stretch.

        Raises:
            JournalCorrupt: A segment is damaged.
            ImpossibleEvent: An event does not fit those before it.
        """
        return checked(self._read.events(stretch.start, stretch.stop - 1), ledger)

    def state_before(self, position: int) -> JournalState | None:
        """Return the state before the first event of a part; None if no snapshot has it."""
        return self._read.state_before(position)

    def undone_to(self, after: int) -> float:
        """Return to which version the parts after a position rewind at most; infinity: to none."""
        found = (each.undone_to for each in self.aggregates[after + 1 :])
        return min((each for each in found if each is not None), default=math.inf)

    def parts_about(self, prompt_index: int) -> range:
        """Return the parts from the first to the last that name a group; empty if none can."""
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
