"""Appends whole lines to a file that several processes may hold open."""

import os
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 16  # bytes of one read while the last newline is looked for


class LineFile:
    """A file of lines, each written whole or not at all.

    Before and after every call it is a sequence of whole lines, or ends in one torn line that the
    next ``append`` cuts off, whichever process makes it. Lines that another process has appended
    meanwhile stay: a process that was replaced may have one more line to write.
    """

    def __init__(self, path: Path) -> None:
        """Create the file and its folder where they are missing.

        Raises:
            OSError: It cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o644)
        self._is_open = True

    def append(self, line: bytes) -> None:
        """Append a line, which ends in a newline.

        Raises:
            OSError: The disk refused it; what it took of the line is cut off by the next call.
        """
        append_line(self._file, line)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._file)


def append_line(file: int, line: bytes) -> None:
    """Append a line to a descriptor opened with ``O_RDWR | O_APPEND``, after a torn one was cut off.

    Raises:
        OSError: The disk refused it.
    """
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.ftruncate(file, _end_of_last_line(file, size))
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(file, rest) :]


def _end_of_last_line(file: int, size: int) -> int:
    """Return the offset after the last newline; 0 without one."""
    position = size
    while position > 0:
        start = max(0, position - _BLOCK)
        newline = os.pread(file, position - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
