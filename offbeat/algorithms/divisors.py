"""Computes the divisors of a step's loss and gradient, once at the end of the step.

Each call of a loss returns its part: units, samples, squares. Parts of microbatches, chunks and
ranks add up, and ``denominator`` reads the total. *Units* are tokens, sequences, or a constant for
each sequence (``normalize`` of the recipe's loss). A branch counts for its share of a sequence.

*Samples* and *squares* (the sum of squared advantages) give the standard deviation of the step's
advantages, which is unknown before the last group. A loss without a KL penalty is proportional to
its advantages. So dividing the gradient by this deviation at the end is the same as dividing the
advantages at the beginning. This is the second half of REINFORCE++ with baseline, arXiv:2501.03262,
section 3.2. verl and OpenRLHF compute mean and deviation over tokens, where long responses count
more and the mean is not 0. A minibatch is divided by the deviation of its whole batch, as if the
advantages had been divided before the batch was cut into minibatches. ``AdvantageSums`` has the
numbers for this without a forward pass. Legend: S sequences.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from offbeat.algorithms.tokens import ValidTokens
from offbeat.config.sections.loss import AnyLossConfig, PolicyGradientLossConfig

STD_EPS: Final = 1e-8
"""Added to the standard deviation of a step's advantages, so that zeros stay zeros."""

Parts = Sequence[float]
"""Units, samples and squares, as numbers."""
NOTHING: Final = (0.0, 0.0, 0.0)


class AdvantageSums(NamedTuple):
    """Samples and squares of several groups: the parts that do not depend on the loss."""

    samples: float = 0.0
    squares: float = 0.0

    def plus(self, other: "AdvantageSums") -> "AdvantageSums":
        """Return the sums over both sets of groups."""
        return AdvantageSums(self.samples + other.samples, self.squares + other.squares)


@torch.no_grad()
def divisor_parts(valid: ValidTokens, counted: ValidTokens, config: AnyLossConfig) -> Tensor:
    """Return the part of one call, float64 [3].

    Args:
        valid: All valid tokens. Their sequences are the samples, or shares of samples.
        counted: Tokens over which the loss is averaged. They are fewer than ``valid`` if a band
            dropped some.
        config: Must have ``constant_tokens`` for ``normalize="constant"``.
    """
    counts_S, present_S = counted.counts_S.double(), valid.counts_S > 0
    share_S = valid.sample_share_S
    sequences = (share_S * (counts_S > 0)).sum()
    match config.normalize:
        case "tokens":
            units = counts_S.sum()
        case "sequences":
            units = sequences
        case _:
            units = sequences * _constant_tokens(config)
    # In float64: the sum over a long sequence must equal its advantage.
    advantages_N = torch.where(valid.mask_N, valid.advantages_N.double(), 0.0)
    sums_S = torch.zeros_like(counts_S).index_add(0, valid.sequence_N, advantages_N)
    squares = (share_S * (sums_S / valid.lengths_S).square()).sum()
    return torch.stack([units, (share_S * present_S).sum(), squares])


def denominator(config: AnyLossConfig, parts: Iterable[Parts]) -> float:
    """Return the divisor of the step's loss and gradient, or 0 if no token counts.

    With ``step_std``, it is the units times the standard deviation of the samples' advantages. The
    mean of the advantages is assumed to be 0. This holds for estimators whose advantages sum to 0
    in each group.
    """
    units, samples, squares = (sum(each) for each in zip(NOTHING, *parts, strict=True))
    if isinstance(config, PolicyGradientLossConfig) and config.step_std and samples:
        return units * (math.sqrt(squares / samples) + STD_EPS)
    return units


def _constant_tokens(config: AnyLossConfig) -> int:
    if config.constant_tokens is None:
        raise AssertionError(f"normalize={config.normalize} without constant_tokens: {config}")
    return config.constant_tokens
