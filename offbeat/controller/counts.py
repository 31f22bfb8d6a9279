"""Counters by key of bounded size. Pure."""

from typing import Final, TypeVar

K = TypeVar("K")
MOST_REASONS: Final = 100
"""Number of distinct reasons counted separately; a reason may come from user code."""
OTHER_REASON: Final = "other"
"""Key under which reasons beyond the limit are counted."""


def count(counts: dict[K, int], key: K, change: int) -> None:
    """Add to a count and remove zeros, so that the size stays that of the described state."""
    total = counts.get(key, 0) + change
    if total:
        counts[key] = total
    else:
        counts.pop(key, None)


def count_reason(counts: dict[str, int], reason: str, groups: int) -> None:
    """Count a reason, keeping a bounded number of them."""
    known = reason in counts or len(counts) < MOST_REASONS
    count(counts, reason if known else OTHER_REASON, groups)
