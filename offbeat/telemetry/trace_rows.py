"""Arranges spans in rows, so that a viewer shows all of them. Pure; times are whole microseconds.

Perfetto draws a row as a stack: two spans of one row are apart, or one holds the other. A span that
would cross another is dropped there. So a span that overlaps goes to the next row of its lane.
"""

from typing import Final

KEPT: Final = 64
"""Outermost spans a row remembers; what begins before those is not drawn in it."""

MAX_ROWS: Final = 64
"""Rows of one lane."""


class TraceRow:
    """Spans that are apart or, if the row ``nests``, hold one another."""

    def __init__(self, *, nests: bool, gap_us: int = 0) -> None:
        """Create the rows. ``gap_us``.

        How much later than a span the one behind it, or within it, has to begin.

        It matters only where the later one is added first. It is 1 where a viewer keeps what begins at one
        moment in the order of the file, and 0 where it puts the longer one first.
        """
        self._nests, self._gap_us = nests, gap_us
        self._spans = list[tuple[int, int]]()  # the outermost ones, in order of time
        self._forgotten_us = 0  # end of the last one that is not kept any more

    def take(self, start_us: int, end_us: int) -> bool:
        """Put the span here; False, and nothing done, when it would cross another."""
        spans = self._spans
        if start_us < self._forgotten_us:
            return False
        first = len(spans)
        while first and spans[first - 1][1] > start_us:
            first -= 1
        behind = first  # spans[first:behind] would be held by the new one
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
    """The rows of one lane; the first one that takes a span gets it."""

    def __init__(self, number: int, *, nests: bool, gap_us: int = 0) -> None:
        self.number = number
        self.last_us = 0  # latest end of any span
        self._nests, self._gap_us = nests, gap_us
        self._rows = list[TraceRow]()

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, start_us: int, end_us: int) -> int | None:
        """The row that holds the span from now on; None: all ``MAX_ROWS`` of them are taken."""
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
