"""Shares of time: how much of each of many equal intervals was spent on what. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Spans = Sequence[tuple[float, float]]


def covered_shares(spans: Spans, end_s: float, intervals: int) -> Floats:
    """Return the share of each interval of ``[0, end_s]`` that disjoint, ascending spans cover."""
    pieces = [(start, end, end - start, np.array([end - start])) for start, end in spans]
    return np.clip(per_interval(pieces, end_s, intervals) * intervals / (end_s or 1.0), 0.0, 1.0)


def merged(spans: Spans, gap_s: float = 0.0) -> list[tuple[float, float]]:
    """Return the union of spans as disjoint spans, ascending; gaps up to ``gap_s`` are closed."""
    union = list[tuple[float, float]]()
    for start, end in sorted(spans):
        if union and start <= union[-1][1] + gap_s:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


BinnedSeconds = tuple[float, float, float, NDArray[np.floating]]
"""Bins of one stretch of time: where it begins and ends, the width of a bin, seconds per bin."""


def per_interval(pieces: Sequence[BinnedSeconds], end_s: float, intervals: int) -> Floats:
    """Return per interval of ``[0, end_s]`` the seconds in bins, spread evenly over each bin.

    Pieces are ascending and do not overlap.
    """
    edges = np.linspace(0.0, end_s, intervals + 1)
    if not pieces or end_s <= 0:
        return np.zeros(intervals)
    times, reached = list[Floats](), list[Floats]()
    total = 0.0
    for began_s, ended_s, width_s, seconds in pieces:
        ends = began_s + width_s * np.arange(len(seconds) + 1)
        times.append(np.minimum(ends, max(ended_s, began_s)))
        sums = total + np.concatenate(([0.0], np.cumsum(seconds, dtype=np.float64)))
        reached.append(sums)
        total = float(sums[-1])
    return np.diff(np.interp(edges, np.concatenate(times), np.concatenate(reached)))
