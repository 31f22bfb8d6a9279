"""Median of a stream of any length, in bounded memory."""

import random
import statistics
from typing import Final

SAMPLE_SIZE: Final = 4096
"""Values kept of a stream. The rank of their median is off by less than 2.5 % (three sigma)."""


class Reservoir:
    """Keeps all values of a short stream, and an even random sample of a long one (algorithm R)."""

    def __init__(self, size: int = SAMPLE_SIZE) -> None:
        self._size = size
        self._sample = list[float]()
        self._rng = random.Random(0)
        self.count = 0
        """Number of values seen."""

    def add(self, value: float) -> None:
        """Add the next value."""
        self.count += 1
        if len(self._sample) < self._size:
            self._sample.append(value)
            return
        place = self._rng.randrange(self.count)
        if place < self._size:
            self._sample[place] = value

    def median(self) -> float:
        """Return the median of the stream: exact up to ``size`` values, an estimate beyond.

        Raises:
            statistics.StatisticsError: There was no value.
        """
        return statistics.median(self._sample)
