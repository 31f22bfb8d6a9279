"""Finds the runs of a directory, detects changes, and packs the data of a page of them."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from offbeat.plugins.report.document import fitting, stories
from offbeat.plugins.report.page import packed
from offbeat.runs.directory import CONFIG, JOURNAL, SUMMARY
from offbeat.runs.inputs import INPUTS
from offbeat.runs.page_files import LinkRefused, check_no_links, page_files

Signature = tuple[tuple[str, int, int], ...]
"""Name, size and modification time of each file that the page uses."""
_LEAST_PAUSE_S: Final = 2.0
_KEPT_PAGES: Final = 32  # of at most some MB each
_PAUSE_PER_BUILD: Final = 5  # the page of a long run costs seconds: use at most a fifth of a core


class NoSuchRun(Exception):
    """The directory holds no run of this name, or the run leads outside of it."""


class WatchedRuns:
    """Run directories directly below one directory. Safe for any number of threads."""

    def __init__(
        self, root: Path, only: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch ``root``. ``only`` names the single run to show."""
        self._root, self._only, self._clock = root, only, clock
        self._built = dict[tuple[str, ...], _Built]()
        self._guard = threading.Lock()

    @classmethod
    def at(cls, directory: Path) -> "WatchedRuns":
        """Watch all runs of a directory, or the directory itself if it is a run."""
        directory = directory.resolve()
        if (directory / JOURNAL).is_dir():
            return cls(directory.parent, directory.name)
        return cls(directory)

    def names(self) -> list[str]:
        """Return the names of all runs, the last written first."""
        found = [
            (self._changed_ns(child.name), child.name)
            for child in self._children()
            if self._is_run(child)
        ]
        return [name for _, name in sorted(found, reverse=True)]

    def directory(self, name: str) -> Path:
        """Return the directory of a run.

        The name is compared with existing names, so no name can lead out of the directory.

        Raises:
            NoSuchRun: No run has the name, or a file of it is a symbolic link.
        """
        directory = next((child for child in self._children() if child.name == name), None)
        if directory is None or not self._is_run(directory):
            raise NoSuchRun(name)
        try:
            check_no_links(directory)
        except LinkRefused as error:
            raise NoSuchRun(name) from error
        return directory

    def readable(self) -> Iterator[tuple[str, Path]]:
        """Yield name and directory of each run, except runs with a symbolic link."""
        for child in sorted(self._children()):
            with contextlib.suppress(LinkRefused):
                if self._is_run(child):
                    check_no_links(child)
                    yield child.name, child

    def signature(self, *names: str) -> Signature:
        """Return a value that changes whenever one of the runs writes a file."""
        return tuple(each for name in names for each in file_states(self.directory(name)))

    def data(self, *names: str) -> str:
        """Return the packed data of a page of one or several runs. Create it again after a change.

        However many readers there are, a page is created only once at a time, and creating it takes
        at most a fifth of the time.

        Raises:
            NoSuchRun: A run does not exist.
            OffbeatError: A journal cannot be read.
        """
        directories = [self.directory(name) for name in names]
        with self._guard:
            built = self._built.pop(names, None) or _Built()
            self._built[names] = built
            while len(self._built) > _KEPT_PAGES:
                del self._built[next(iter(self._built))]  # the least recently read
        with built.lock:
            now_s = self._clock()
            signature = self.signature(*names)
            if built.signature != signature and now_s >= built.not_before_s:
                built.data = fitting(stories(directories), packed)
                built.signature = signature
                ended_s = self._clock()
                pause_s = max(_LEAST_PAUSE_S, _PAUSE_PER_BUILD * (ended_s - now_s))
                built.not_before_s = ended_s + pause_s
            return built.data

    def _children(self) -> list[Path]:
        try:
            return list(self._root.iterdir())
        except OSError:
            return []

    def _is_run(self, child: Path) -> bool:
        if self._only not in {None, child.name} or not _is_text(child.name):
            return False
        try:
            has_begun = (child / JOURNAL).is_dir() or (child / SUMMARY).is_file()
            # A run that has not begun, or whose start was killed, has only its recipe and inputs.
            is_there = has_begun or all((child / name).is_file() for name in (CONFIG, INPUTS))
            return not child.is_symlink() and is_there
        except OSError:  # not readable: another user's
            return False

    def _changed_ns(self, name: str) -> int:
        return max((changed for _, _, changed in file_states(self._root / name)), default=0)


class _Built:
    """Latest data of one page."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.signature: Signature | None = None
        self.data = ""
        self.not_before_s = float("-inf")


def _is_text(name: str) -> bool:
    """Return whether a directory name encodes as UTF-8. Other names cannot appear in a URL."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def file_states(directory: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and modification time of each file that the page uses."""
    for path in sorted(page_files(directory)):
        try:
            found = path.lstat()
        except OSError:
            continue  # not written yet, or being replaced
        yield path.name, found.st_size, found.st_mtime_ns
