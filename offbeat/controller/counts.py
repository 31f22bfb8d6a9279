"""Counts by key whose size is bounded by what they describe. Pure."""

from typing import Final, TypeVar

K = TypeVar("K")
MOST_REASONS: Final = 100
"""Distinct reasons that are counted apart; a reason may come from a user's code."""
OTHER_REASON: Final = "other"
"""Key under which reasons beyond the limit are counted."""


def count(counts: dict[K, int], key: K, change: int) -> None:
    """Count, keeping no zeros: the dictionaries stay as small as what they describe."""
    total = counts.get(key, 0) + change
    if total:
        counts[key] = total
    else:
        counts.pop(key, None)


def count_reason(counts: dict[str, int], reason: str, groups: int) -> None:
    """Count, keeping a bounded number of reasons."""
    known = reason in counts or len(counts) < MOST_REASONS
    count(counts, reason if known else OTHER_REASON, groups)
