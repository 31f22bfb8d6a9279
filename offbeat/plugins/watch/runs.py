"""Finds the runs of a directory, detects changes, and packs their page data."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from offbeat.plugins.report.document import fitting, stories
from offbeat.plugins.report.page import packed
from offbeat.plugins.report.verdicts import State
from offbeat.runs.directory import JOURNAL, SUMMARY
from offbeat.runs.limits import (
    STATUS_BYTES,
    SUMMARY_BYTES,
    FileTooLarge,
    NoRegularFile,
    read_limited,
)
from offbeat.runs.page_files import LinkRefused, check_no_links, page_files
from offbeat.telemetry.status_file import STATUS_FILE, StatusRecord
from offbeat.telemetry.summary import Summary

T = TypeVar("T")
Signature = tuple[tuple[str, int, int], ...]
"""Name, size and modification time of each file that the page uses."""
_LEAST_PAUSE_S: Final = 2.0
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
        self._built = dict[str, _Built]()
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
        for name in self.names():
            with contextlib.suppress(NoSuchRun):
                yield name, self.directory(name)

    def signature(self, name: str) -> Signature:
        """Return a value that changes whenever the run writes a file."""
        return tuple(_states(self.directory(name)))

    def data(self, name: str) -> str:
        """Return the packed data of the run's page. Create it again after a change.

        For any number of readers, one run is read once at a time, for at most a fifth of the time.

        Raises:
            NoSuchRun: The run does not exist.
            OffbeatError: Its journal cannot be read.
        """
        directory = self.directory(name)
        with self._guard:
            built = self._built.setdefault(name, _Built())
        with built.lock:
            now_s = self._clock()
            signature = tuple(_states(directory))
            if built.signature != signature and now_s >= built.not_before_s:
                built.data = fitting(stories([directory]), packed)
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
            is_there = (child / JOURNAL).is_dir() or (child / SUMMARY).is_file()  # failed at start
            return not child.is_symlink() and is_there
        except OSError:  # not readable: another user's
            return False

    def _changed_ns(self, name: str) -> int:
        return max((changed for _, _, changed in _states(self._root / name)), default=0)


class _Built:
    """Latest data of one run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.signature: Signature | None = None
        self.data = ""
        self.not_before_s = float("-inf")


class RunLine(msgspec.Struct, frozen=True):
    """One line of the list of runs."""

    name: str
    state: State
    steps: int | None
    reward: float | None  # mean over the last steps
    error: str
    changed_unix_s: float


def run_lines(runs: WatchedRuns) -> list[RunLine]:
    """Return the list of runs, the last written first."""
    return [_line(name, directory, time.time()) for name, directory in runs.readable()]


def _line(name: str, directory: Path, now_unix_s: float) -> RunLine:
    changed = {file: changed_ns / 1e9 for file, _, changed_ns in _states(directory)}
    newest = max(changed.values(), default=0.0)
    summary = _decoded(directory / SUMMARY, SUMMARY_BYTES, Summary)
    record = _decoded(directory / STATUS_FILE, STATUS_BYTES, StatusRecord)
    is_newer = changed.get(STATUS_FILE, 0.0) > changed.get(SUMMARY, 0.0) + _LEAST_PAUSE_S
    if record is not None and is_newer and record.is_fresh(now_unix_s):
        return RunLine(name, "running", record.status.step, record.status.reward, "", newest)
    if summary is None or is_newer:  # a resumed run keeps its old summary
        return RunLine(name, "unfinished", None, None, "", newest)
    error = summary.error or ""
    return RunLine(name, summary.outcome, summary.steps, summary.reward_last, error, newest)


def _decoded(path: Path, nbytes: int, kind: type[T]) -> T | None:
    """Decode a JSON file of a run; return None if it is missing or has other content."""
    try:
        return msgspec.json.decode(read_limited(path, nbytes), type=kind)
    except (OSError, FileTooLarge, NoRegularFile, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _is_text(name: str) -> bool:
    """Return whether a directory's name is Unicode, because other names have no URL."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _states(directory: Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(page_files(directory)):
        try:
            found = path.lstat()
        except OSError:
            continue  # not written yet, or being replaced
        yield path.name, found.st_size, found.st_mtime_ns
