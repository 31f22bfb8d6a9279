"""Seconds by name over a stretch of time of unknown length, in a bounded number of bins. Pure."""

from array import array
from collections.abc import Iterable
from typing import Final

BINS: Final = 256
_NARROWEST: Final = 0.01  # seconds


class TimeBins:
    """Bins of equal width from one moment on; the width doubles whenever the bins are used up."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.width_s = _NARROWEST
        self._seconds = dict[str, list[float]]()

    def add(self, name: str, start_s: float, end_s: float, seconds: float) -> None:
        """Spread seconds evenly over ``[start_s, end_s]``; what lies before the first bin is cut."""
        bins = self._seconds.get(name)
        if bins is None:
            bins = self._seconds[name] = [0.0] * BINS
        start, end = max(0.0, start_s - self.began_s), max(0.0, end_s - self.began_s)
        while end >= BINS * self.width_s:
            self.halve()
        width = self.width_s
        first, last = int(start / width), int(end / width)
        if first >= last:
            bins[last] += seconds
            return
        rate = seconds / (end - start)
        bins[first] += ((first + 1) * width - start) * rate
        for number in range(first + 1, last):
            bins[number] += width * rate
        bins[last] += (end - last * width) * rate

    def to_bytes(self) -> dict[str, bytes]:
        """Return the bins of each name as float32, little endian on every machine that Ray runs on."""
        return {name: array("f", bins).tobytes() for name, bins in self._seconds.items()}

    def halve(self) -> None:
        """Add each two neighbouring bins up: half as many are in use, of twice the width."""
        self.width_s *= 2
        for bins in self._seconds.values():
            pairs = [bins[2 * half] + bins[2 * half + 1] for half in range(BINS // 2)]
            bins[:] = pairs + [0.0] * (BINS // 2)


def align(all_bins: Iterable[TimeBins]) -> None:
    """Give bins that begin at the same moment the same width: that of the widest."""
    bins = list(all_bins)
    width_s = max(each.width_s for each in bins)
    for each in bins:
        while each.width_s < width_s:
            each.halve()
