"""The samples of a trained step, bounded: two histograms and some rows, for trackers that show them.

``metrics.jsonl`` has no samples. The text of a sample is in ``rollouts/``.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

MOST_ROWS: Final = 64
"""Maximum rows of a step. A sink may lag by thousands of steps, and their rows stay in memory."""
BINS: Final = 32


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values in bins of equal width."""

    edges: tuple[float, ...]  # ascending, one more than counts
    counts: tuple[int, ...]


class SampleRow(msgspec.Struct, frozen=True):
    """A trained sample. Prompt index, attempt and sample find its text in ``rollouts/``."""

    prompt_index: int
    attempt: int
    sample: int  # within its group
    reward: float
    advantage: float


class StepSamples(msgspec.Struct, frozen=True):
    """The valid samples of one step."""

    rewards: Histogram | None  # None: no value is finite
    response_tokens: Histogram | None
    rows: tuple[SampleRow, ...]  # some samples of the first groups


def count_in_bins(values: Sequence[float], bins: int = BINS) -> Histogram | None:
    """Count the finite values in bins between the lowest and the highest, or return None."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if low == high:
        low, high = low - 0.5, high + 0.5
    width = high - low
    if not (width > 0 and 0 < (scale := bins / width) < math.inf):  # beyond what floats resolve
        return None
    counts = [0] * bins
    for value in finite:
        counts[min(bins - 1, int((value - low) * scale))] += 1
    edges = (*(min(high, low + at / scale) for at in range(bins)), high)
    return Histogram(edges, tuple(counts))
