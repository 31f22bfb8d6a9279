"""Reads the journal of a finished, crashed or live run."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from offbeat.controller.events import AnyEvent
from offbeat.controller.journal import read_journal
from offbeat.controller.journal.legality import contradiction
from offbeat.controller.ledger import Ledger
from offbeat.messages.failures import FixableError, OffbeatError, ShortInNotebooks
from offbeat.messages.text import cut
from offbeat.run_files.limits import regular_bytes
from offbeat.runs.directory import CONFIG, JOURNAL, SUMMARY, what_to_name

_LONGEST_EVENT: Final = 500
"""Maximum characters of an event in a message. A step or a rewind may have very many groups."""


class NotARun(ShortInNotebooks, FixableError):
    """A directory that was passed as a run has no journal.

    Fix: pass the suggested run; if it never started, see ``error`` in ``summary.json``.
    """


class ImpossibleEvent(OffbeatError):
    """An event of the journal does not fit the earlier events, so no ledger has written it.

    Fix: report it.
    """

    number: int
    event: str
    problem: str

    def __str__(self) -> str:
        return (
            f"event {self.number} of the journal cannot have happened: {self.problem}: {self.event}. "
            "Keep the run directory and report this"
        )


def never_began(run_dir: Path) -> NotARun:
    """Return the error for a run that ended before it wrote a journal record."""
    return NotARun(str(run_dir), "its run ended before its first record", f"See {SUMMARY}")


def run_directory(run_dir: Path) -> Path:
    """Return the directory if it exists.

    Raises:
        NotARun: The directory does not exist.
    """
    if not run_dir.is_dir():
        problem = "a file" if run_dir.exists() else "no such directory"
        raise NotARun(str(run_dir), problem, what_to_name(run_dir))
    return run_dir


def find_journal(run_dir: Path) -> Path:
    """Return the path of the run's journal.

    Raises:
        NotARun: The journal is missing.
        NoRegularFile: An entry in it is not a regular file. (Opening a pipe would wait.)
    """
    journal = run_directory(run_dir) / JOURNAL
    if not journal.is_dir() and (run_dir / SUMMARY).exists():
        raise never_began(run_dir)
    if not journal.is_dir() and (run_dir / CONFIG).exists():
        raise NotARun(str(run_dir), "its run has not begun yet, or has lost its journal", "Wait")
    if not journal.is_dir():
        raise NotARun(str(run_dir), "it holds no journal", what_to_name(run_dir))
    for path in journal.iterdir():
        with suppress(FileNotFoundError):  # the run has just removed it
            regular_bytes(path)
    return journal


def read_events(run_dir: Path | str) -> Iterator[AnyEvent]:
    """Yield every event of a run's journal, oldest first, for all incarnations of its controller.

    Raises:
        NotARun: The directory contains no journal.
        JournalCorrupt: A file of the journal is damaged.
        JournalVersion: A different version of offbeat wrote it.
    """
    return read_journal(find_journal(Path(run_dir)))


def fold_events(journal: Path, ledger: Ledger) -> Iterator[tuple[int, AnyEvent]]:
    """Yield every event with its number, from 1, after the ledger has applied it.

    Raises:
        JournalCorrupt: A file of the journal is damaged.
        ImpossibleEvent: An event does not fit the earlier events.
    """
    return check_events(enumerate(read_journal(journal), start=1), ledger)


def check_events(
    numbered: Iterable[tuple[int, AnyEvent]], ledger: Ledger
) -> Iterator[tuple[int, AnyEvent]]:
    """Yield numbered events after the ledger has applied them.

    Raises:
        ImpossibleEvent: An event does not fit the earlier events.
    """
    for number, event in numbered:
        problem = contradiction(ledger, event)
        if problem is not None:
            raise ImpossibleEvent(number, cut(repr(event), _LONGEST_EVENT), problem)
        ledger.apply(event)
        if not conserves(ledger):
            raise ImpossibleEvent(
                number, cut(repr(event), _LONGEST_EVENT), f"groups do not add up: {ledger}"
            )
        yield number, event


def clock_time(unix_s: float) -> str:
    """Format a time as logs do, to the millisecond, or as a dash if the journal has no time."""
    moment = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z") if unix_s else "-"


def conserves(ledger: Ledger) -> bool:
    """Return whether every admitted group is in exactly one place."""
    places = ledger.admitted + ledger.in_flight + len(ledger.ready) + len(ledger.training)
    ended = ledger.totals.trained + sum(ledger.totals.dropped.values())
    return ledger.totals.drawn == places + ended and places == len(ledger.groups)
