"""Stores the ledger's events on disk, for the next controller, ``replay`` and ``why``.

file_journal   appends on the event loop, barriers, and, off the loop, segments and snapshots
frames         the bytes of a record, errors of damaged or refused files
reading        all events, and the ledger that results from them
parts          sums over parts of the journal
legality       which event can follow in which state of the table
"""

from offbeat.controller.journal.file_journal import FileJournal, open_journal
from offbeat.controller.journal.frames import (
    JournalCorrupt,
    JournalFailed,
    JournalRemoved,
    JournalTaken,
    JournalVersion,
)
from offbeat.controller.journal.parts import (
    JournalPart,
    JournalParts,
    JournalState,
    differing_aggregates,
    read_parts,
)
from offbeat.controller.journal.reading import read_journal, recover, recover_with_totals

__all__ = [
    "FileJournal",
    "JournalCorrupt",
    "JournalFailed",
    "JournalPart",
    "JournalParts",
    "JournalRemoved",
    "JournalState",
    "JournalTaken",
    "JournalVersion",
    "differing_aggregates",
    "open_journal",
    "read_journal",
    "read_parts",
    "recover",
    "recover_with_totals",
]
