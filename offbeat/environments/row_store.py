"""Rows of a prompt file as bytes: appended once, then read in any order."""

import heapq
import weakref
from array import array
from collections.abc import Iterable
from tempfile import SpooledTemporaryFile
from typing import Final

MEMORY_BYTES: Final = 64 * 2**20
"""Bytes of rows that are kept in memory; more go to a temporary file, which has no name."""


class RowStore:
    """Sequence of rows. The memory it needs does not grow with the rows beyond ``memory_bytes``.

    Apart from 8 bytes per row. The temporary file lies where ``TMPDIR`` says and ends with the
    object.

    Raises:
        OSError: The rows do not fit on the disk.
    """

    def __init__(self, rows: Iterable[bytes], memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = SpooledTemporaryFile(max_size=memory_bytes, prefix="offbeat-rows-")  # noqa: SIM115 - read until the end
        weakref.finalize(self, self._file.close)
        self._ends = array("Q", [0])
        for row in rows:
            self._file.write(row)
            self._ends.append(self._ends[-1] + len(row))
        self._file.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> bytes:
        start, end = self._ends[row], self._ends[row + 1]
        self._file.seek(start)
        return self._file.read(end - start)

    def longest(self, count: int) -> list[int]:
        """Return the numbers of the longest rows, longest first."""
        ends = self._ends
        return heapq.nlargest(count, range(len(self)), key=lambda row: ends[row + 1] - ends[row])
