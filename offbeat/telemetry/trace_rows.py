"""Arranges spans in rows, so that a viewer shows all of them. Pure; times are in microseconds.

Perfetto draws a row as a stack: two spans of one row are disjoint or nested, and it drops a span
that crosses another. So an overlapping span goes to the next row of its lane.
"""

from typing import Final

KEPT: Final = 64
"""Outermost spans that a row remembers; spans that begin before those are not added to it."""

MAX_ROWS: Final = 64
"""Maximum number of rows of one lane."""


class TraceRow:
    """Spans that are disjoint or, if the row ``nests``, nested."""

    def __init__(self, *, nests: bool, gap_us: int = 0) -> None:
        """Create a row.

        Args:
            nests: Whether spans may be nested.
            gap_us: Minimum delay between the start of a span and the start of one after or inside
                it. It matters only if the later one is added first. It is 1 where a viewer keeps
                events of one moment in the order of the file, and 0 where it draws the longer one
                first.
        """
        self._nests, self._gap_us = nests, gap_us
        self._spans = list[tuple[int, int]]()  # the outermost ones, in order of time
        self._forgotten_us = 0  # end of the last one that was discarded

    def take(self, start_us: int, end_us: int) -> bool:
        """Add the span; return False, and change nothing, if it would cross another."""
        spans = self._spans
        if start_us < self._forgotten_us:
            return False
        first = len(spans)
        while first and spans[first - 1][1] > start_us:
            first -= 1
        behind = first  # spans[first:behind] would be inside the new one
        while behind < len(spans) and spans[behind][1] <= end_us:
            behind += 1
        holds, followed = behind > first, behind < len(spans)
        if holds and not (self._nests and spans[first][0] >= start_us + self._gap_us):
            return False
        if followed and spans[behind][0] < end_us + self._gap_us:
            return False
        spans[first:behind] = [(start_us, end_us)]
        if len(spans) > KEPT:
            self._forgotten_us = spans.pop(0)[1]
        return True


class Lane:
    """Rows of one lane; a span goes to the first row that accepts it."""

    def __init__(self, number: int, *, nests: bool, gap_us: int = 0) -> None:
        self.number = number
        self.last_us = 0  # latest end of any span
        self._nests, self._gap_us = nests, gap_us
        self._rows = list[TraceRow]()

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, start_us: int, end_us: int) -> int | None:
        """Add the span to a row and return its index; None if all ``MAX_ROWS`` refuse it."""
        self.last_us = max(self.last_us, end_us)
        for number, row in enumerate(self._rows):
            if row.take(start_us, end_us):
                return number
        if len(self._rows) == MAX_ROWS:
            return None
        row = TraceRow(nests=self._nests, gap_us=self._gap_us)
        row.take(start_us, end_us)
        self._rows.append(row)
        return len(self._rows) - 1
