"""Allocator of ranges of an arena. Pure: it computes sizes and offsets, and touches no memory."""

from bisect import bisect_left
from typing import Final

PAGE: Final = 4096
"""Slots begin and end on pages, so the memory of a free one can be given back to the system."""


def rounded(nbytes: int, to: int = PAGE) -> int:
    """``nbytes``, rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


class Slots:
    """First fit, lowest offset first: what was written lately, and is warm, is used again first.

    Between calls free ranges are sorted, apart from each other, and together with the taken ones
    cover the arena exactly.
    """

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, length), sorted
        self._taken: dict[int, int] = {}  # offset -> length

    def take(self, nbytes: int) -> int | None:
        """The offset of a free range of at least ``nbytes``, now taken; None if there is none."""
        length = rounded(max(nbytes, 1))
        for index, (offset, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[index]
                else:
                    self._free[index] = (offset + length, free - length)
                self._taken[offset] = length
                return offset
        return None

    def give(self, offset: int) -> int:
        """Free a taken range; its length.

        Raises:
            KeyError: Nothing taken begins there.
        """
        length = freed = self._taken.pop(offset)
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            start, before = self._free[index - 1]
            self._free[index - 1] = (start, before + length)
        else:
            self._free.insert(index, (offset, length))
        return freed
