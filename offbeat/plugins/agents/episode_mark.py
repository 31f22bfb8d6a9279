"""Shared memory in which a process notes whose code it executes, readable after its death."""

import mmap
import os
from tempfile import TemporaryFile
from typing import Final, Self

_BYTES: Final = 8


class EpisodeMark:
    """Number of the episode whose code a process executes at this moment; 0 for none.

    The file has no name and ends with its last user. A process that crashes cannot say why; the
    number that it leaves here says in which episode.
    """

    def __init__(self, fd: int) -> None:
        """Map the file of that descriptor, which may be closed afterwards."""
        self._memory = mmap.mmap(fd, _BYTES)
        self._number = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Return a mark of a new file, and the file's descriptor for another process to map it."""
        with TemporaryFile() as file:
            file.truncate(_BYTES)
            return cls(file.fileno()), os.dup(file.fileno())

    @property
    def number(self) -> int:
        return self._number[0]

    @number.setter
    def number(self, number: int) -> None:
        self._number[0] = number

    def close(self) -> None:
        self._number.release()
        self._memory.close()
