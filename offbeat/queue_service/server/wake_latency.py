"""Latency between the arrival of data and the reply to a waiting client."""

from typing import Final

_BITS: Final = 3  # significant bits kept of each time: a bound is at most a quarter too high
_STEPS: Final = 1 << (_BITS - 1)
_BUCKETS: Final = 160
_US: Final = 1e6


class LatencyHistogram:
    """Histogram of times in fixed memory: each bucket is at most a quarter of its value wide."""

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
        """Upper bound of the 99th percentile, at most a quarter and a microsecond too high.

        0 if empty.
        """
        above = self.count // 100  # number of larger values allowed
        for bucket in range(_BUCKETS - 1, -1, -1):
            above -= self._counts[bucket]
            if above < 0:
                shift = max(bucket // _STEPS - 1, 0)
                return ((bucket - shift * _STEPS + 1) << shift) / _US
        return 0.0
