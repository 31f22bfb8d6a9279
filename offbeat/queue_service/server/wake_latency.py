"""Latency between the arrival of data and the reply to a waiting client."""

from typing import Final

_BITS: Final = 3  # kept of each time, so a bound is at most a quarter too high
_STEPS: Final = 1 << (_BITS - 1)
_BUCKETS: Final = 160
_US: Final = 1e6


class LatencyHistogram:
    """A histogram of times that grows with nothing: each in a bucket at most a quarter of it wide."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.count = 0

    def add(self, seconds: float) -> None:
        us = max(int(seconds * _US), 0)
        shift = max(us.bit_length() - _BITS, 0)
        self._counts[min(shift * _STEPS + (us >> shift), _BUCKETS - 1)] += 1
        self.count += 1

    @property
    def p99_s(self) -> float:
        """An upper bound, at most a quarter and a microsecond too high; 0 before the first."""
        above = self.count // 100  # so many may have taken longer
        for bucket in range(_BUCKETS - 1, -1, -1):
            above -= self._counts[bucket]
            if above < 0:
                shift = max(bucket // _STEPS - 1, 0)
                return ((bucket - shift * _STEPS + 1) << shift) / _US
        return 0.0
