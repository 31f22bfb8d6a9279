"""Allocator of ranges of an arena. Pure: computes sizes and offsets, touches no memory."""

from bisect import bisect_left
from typing import Final

PAGE: Final = 4096
"""Slots begin and end on pages, so that the memory of a free slot can be released."""


def rounded(nbytes: int, to: int = PAGE) -> int:
    """Round ``nbytes`` up to a multiple of ``to``."""
    return -(-nbytes // to) * to


class Slots:
    """First-fit allocator, lowest offset first, so that recently written memory is reused first.

    Between calls, free ranges are sorted and separate, and together with the allocated ones cover
    the arena exactly.
    """

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, length), sorted
        self._taken: dict[int, int] = {}  # length by offset

    def take(self, nbytes: int) -> int | None:
        """Allocate at least ``nbytes``.

        Return the offset, or None if no free range is large enough.
        """
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
        """Free an allocated range; return its length.

        Raises:
            KeyError: No allocated range begins there.
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
