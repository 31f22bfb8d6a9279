"""``offbeat report``: writes the page of one run, or of several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from offbeat.runs.report.document import fitting, stories
from offbeat.runs.report.page import page
from offbeat.telemetry.summary import write_atomically

DEFAULT_NAME: Final = "report.html"


class WrittenReport(NamedTuple):
    """Path and size of a page that was written."""

    path: Path
    nbytes: int


def write_report(run_dirs: Sequence[Path], output: Path | None) -> WrittenReport:
    """Write the page to ``output``; default: into the first run's directory.

    Raises:
        NotARun: A directory has no journal.
        JournalCorrupt: A file of a journal is damaged.
        JournalVersion: Another version of offbeat wrote it.
        LinkRefused: A file of a run is a symbolic link.
        ImpossibleEvent: An event of a journal does not fit those before it.
        OSError: The file cannot be written.
    """
    content = fitting(stories(run_dirs), page).encode()
    path = output or run_dirs[0] / DEFAULT_NAME
    write_atomically(path, content)
    return WrittenReport(path, len(content))
