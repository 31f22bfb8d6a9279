"""Appends whole lines to a file that several processes may hold open."""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 16  # bytes per read in the search for the last newline
_LOCK_WAITS_S: Final = (0.0, 0.001, 0.01, 0.1, 1.0)  # an append needs microseconds


class LineFile:
    """A file of lines, each written completely or not at all.

    Before and after every call, the file is a sequence of complete lines, perhaps with a torn line
    at the end. The next ``append`` of any process cuts a torn line off. Lines that other processes
    append at the same time are kept, because a replaced process may have one more line to write.
    """

    def __init__(self, path: Path) -> None:
        """Create the file and its folder if missing.

        Raises:
            OSError: The file cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o644)
        self._is_open = True

    def append(self, line: bytes) -> None:
        """Append a line, which ends in a newline.

        Raises:
            OSError: The disk refused the line. The next call cuts off any part of it on disk.
        """
        append_line(self._file, line)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._file)


def append_line(file: int, line: bytes) -> None:
    """Append a line to a descriptor opened with ``O_RDWR | O_APPEND``. First cut off a torn line.

    Processes lock the file in turn. If a process is stopped while it holds the lock, each append of
    another process waits a second. It then does not cut a torn line off, but ends it with a
    newline.

    Raises:
        OSError: The disk refused the line.
    """
    with _lock(file) as is_locked:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            if is_locked:  # else another process may be writing that line
                os.ftruncate(file, _end_of_last_line(file, size))
            else:
                line = b"\n" + line
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(file, rest) :]


@contextmanager
def _lock(file: int) -> Generator[bool]:
    """Lock a file against other appending processes. Yield whether it was locked in time."""
    is_locked = False
    for wait_s in _LOCK_WAITS_S:
        time.sleep(wait_s)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError:  # a file system without locks
            break
        is_locked = True
        break
    try:
        yield is_locked
    finally:
        if is_locked:
            fcntl.flock(file, fcntl.LOCK_UN)


def _end_of_last_line(file: int, size: int) -> int:
    """Return the offset after the last newline, or 0 without one."""
    position = size
    while position > 0:
        start = max(0, position - _BLOCK)
        newline = os.pread(file, position - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
