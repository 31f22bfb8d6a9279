"""Stores the ledger's events on disk, for the next controller, ``replay`` and ``why``.

file_journal   appends on the event loop, barriers         frames   the bytes of a record
files          segments and snapshots, off the loop        disk     system calls, one by one
reading        all events; the ledger they add up to       errors   damaged or refused files
parts          what stretches of the journal add up to     legality which event can follow in
                                                                    which state of the table
"""

from offbeat.controller.journal.errors import (
    JournalCorrupt,
    JournalFailed,
    JournalRemoved,
    JournalTaken,
    JournalVersion,
)
from offbeat.controller.journal.file_journal import FileJournal, open_journal
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
