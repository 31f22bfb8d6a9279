"""Reductions of partial metrics to metrics of a whole step."""

import enum
from typing import NamedTuple

from torch import Tensor


class PartialReduction(enum.StrEnum):
    """Reduction of a metric's parts, and the divisor of their sum at the end."""

    TOKENS = "tokens"  # sum over valid tokens / number of valid tokens
    SEQUENCES = "sequences"  # sum over sequences / number of sequences with a valid token
    LOSS = "loss"  # sum / divisor of the loss: ``divisors.denominator``
    MIN = "min"  # never scaled
    MAX = "max"  # never scaled


class PartialMetric(NamedTuple):
    """One part's contribution: a sum (or an extremum), not yet divided by anything."""

    reduction: PartialReduction
    value: Tensor  # scalar, detached
