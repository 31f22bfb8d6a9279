"""Names the diagnostics by staleness. Needs no torch, because the metric table reads them too."""

from typing import Final

FIRSTS: Final = (0, 1, 2, 4)
"""Staleness, in weight versions, at which each bucket begins. The last bucket is open-ended."""

LABELS: Final = ("0", "1", "2_3", "4_up")
"""Suffixes of the buckets in metric names."""

PERCENTILES: Final = (5, 50, 95)
"""Percentiles of the behaviour ratio."""

ON_POLICY_GAP: Final = "off_policy/logprob_gap_on_policy"
"""Mean distance between the logprobs of trainer and engine over sequences of staleness 0."""

ON_POLICY_TOKENS: Final = "off_policy/on_policy_tokens"
"""Number of tokens in that mean."""


def metric_name(statistic: str, label: str) -> str:
    """Return the name of a metric, such as ``staleness/ratio_p95_at_2_3``."""
    return f"staleness/{statistic}_at_{label}"
