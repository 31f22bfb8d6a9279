"""Inputs and outputs of a loss. Legend: N tokens, S sequences.

Tokens are on one flat axis, regardless of the microbatch's shape. All tokens of a sequence are in
the same call. A sequence is a sample, or one branch of a sample. Other branches of the sample may
be in other calls. A branch counts for its share of the sample's tokens, so that the sample counts
as one sample.

This module also has the reductions of partial metrics to metrics of a whole step.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from tensordict import TensorClass
from torch import Tensor


class PartialReduction(enum.StrEnum):
    """Reduction of a metric's parts, and the divisor that their sum gets at the end."""

    TOKENS = "tokens"  # sum over valid tokens / number of valid tokens
    SEQUENCES = "sequences"  # sum over sequences / number of sequences with a valid token
    LOSS = "loss"  # sum / divisor of the loss: ``divisors.denominator``
    MIN = "min"  # never scaled
    MAX = "max"  # never scaled


class PartialMetric(NamedTuple):
    """Contribution of one part to a metric: a sum (or an extremum), not divided yet."""

    reduction: PartialReduction
    value: Tensor  # scalar, detached


LOG_RATIO_LIMIT: Final = 20.0
"""Bound on the absolute value of log-ratios: ``exp`` stays finite in float32 and bfloat16."""


class LossTokens(TensorClass["nocast"]):
    """Per-token inputs of a loss: a TensorDict of batch size [], with its fields as attributes.

    If ``mask_N`` is False, values may be anything, including NaN.
    """

    logprobs_N: Tensor  # under the weights being trained; carries the gradient
    old_N: Tensor  # denominator of the importance ratio
    generation_N: Tensor | None  # as reported by the engine; None: no engine sampled the tokens
    reference_N: Tensor | None  # of the frozen reference; None without a KL penalty
    advantages_N: Tensor
    mask_N: Tensor  # bool; True where the token is trained
    sequence_N: Tensor  # int64 in [0, sequences)
    sequences: int
    staleness_N: Tensor | None = None  # int; weight versions behind the trainer; None: unknown
    teacher_N: Tensor | None = None  # of the frozen teacher; None without one
    sample_share_S: Tensor | None = (
        None  # float64; trained tokens over those of the sample; None: 1
    )
    # Of the distribution from which each token was sampled, under the trained weights, with its
    # gradient; None: unknown
    entropy_N: Tensor | None = None

    def sequence_sums(self, values_N: Tensor) -> Tensor:
        """Return the sum over each sequence's trained tokens, [N] -> [S]."""
        return sum_sequences(values_N, self.mask_N, self.sequence_N, self.sequences)


@dataclass(frozen=True, slots=True)
class LossSums:
    """Loss, summed over tokens or sequence means as configured, and the parts of its divisor."""

    loss: Tensor  # scalar, carries the gradient
    metrics: dict[str, PartialMetric]
    divisor: Tensor  # float64 [3], what ``divisors.denominator`` adds up
    spread: Tensor | None = None  # sums by staleness (``diagnostics``); None: staleness unknown


Loss = Callable[[LossTokens, Any], LossSums]
"""Function of tokens and of the config section with the loss's name."""


@dataclass(frozen=True, slots=True)
class ValidTokens:
    """Tokens whose invalid values are replaced by 0, so that all values are finite."""

    logprobs_N: Tensor
    old_N: Tensor
    generation_N: Tensor
    reference_N: Tensor | None
    advantages_N: Tensor
    mask_N: Tensor  # bool
    sequence_N: Tensor
    counts_S: Tensor  # valid tokens of each sequence
    sample_share_S: Tensor  # float64; weight of each sequence when samples count
    teacher_N: Tensor | None = None
    entropy_N: Tensor | None = None

    @property
    def lengths_S(self) -> Tensor:  # noqa: N802 - an axis
        """Return ``counts_S``, at least 1: the divisors of sequence means."""
        return self.counts_S.clamp(min=1)

    def without(self, dropped_N: Tensor) -> "ValidTokens":
        """Return a copy in which fewer tokens are valid."""
        mask_N = self.mask_N & ~dropped_N
        return replace(
            self, mask_N=mask_N, counts_S=_counts(mask_N, self.sequence_N, self.counts_S)
        )

    def sequence_sums(self, values_N: Tensor) -> Tensor:
        """Return the sum over each sequence's valid tokens, [N] -> [S]."""
        return sum_sequences(values_N, self.mask_N, self.sequence_N, len(self.counts_S))


def valid_tokens(tokens: LossTokens, old_logprobs: str = "generation") -> ValidTokens:
    """Replace invalid values before anything is computed from them: no NaN reaches a gradient.

    All values get the type of ``logprobs_N``, or float32 if that type is shorter, because counts
    must be exact. With ``old_logprobs="current"`` the old policy is the policy being trained, with
    its logprobs detached.
    """
    mask_N = tokens.mask_N
    dtype = torch.promote_types(tokens.logprobs_N.dtype, torch.float32)

    def valid(values_N: Tensor) -> Tensor:
        """Return the values, [N], with 0 where the token is not valid."""
        return torch.where(mask_N, values_N.to(dtype), 0.0)

    logprobs_N = valid(tokens.logprobs_N)
    none_S = torch.zeros(tokens.sequences, dtype=dtype, device=mask_N.device)
    share_S = torch.ones_like(none_S, dtype=torch.float64)
    current, drawn = old_logprobs == "current", tokens.generation_N
    return ValidTokens(
        logprobs_N=logprobs_N,
        old_N=logprobs_N.detach() if current else valid(tokens.old_N),
        generation_N=logprobs_N.detach() if drawn is None else valid(drawn),
        reference_N=None if tokens.reference_N is None else valid(tokens.reference_N),
        advantages_N=valid(tokens.advantages_N),
        mask_N=mask_N,
        sequence_N=tokens.sequence_N,
        counts_S=_counts(mask_N, tokens.sequence_N, none_S),
        sample_share_S=share_S if tokens.sample_share_S is None else tokens.sample_share_S,
        teacher_N=None if tokens.teacher_N is None else valid(tokens.teacher_N),
        entropy_N=None if tokens.entropy_N is None else valid(tokens.entropy_N),
    )


def sum_sequences(values_N: Tensor, mask_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Return the sum over each sequence's tokens in the mask, [N] -> [sequences]."""
    masked_N = torch.where(mask_N, values_N, 0.0)
    return masked_N.new_zeros(sequences).index_add(0, sequence_N, masked_N)


def _counts(mask_N: Tensor, sequence_N: Tensor, like_S: Tensor) -> Tensor:
    """Return the number of valid tokens of each sequence, [S]."""
    return torch.zeros_like(like_S).index_add(0, sequence_N, mask_N.to(like_S.dtype))


def ratio(log_ratio: Tensor) -> Tensor:
    """Return ``exp`` of the log-ratio clamped to ``LOG_RATIO_LIMIT``, with zero gradient beyond it.

    [N] per token or [S] per sequence. The result has the shape of ``log_ratio``.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def token_mean(values_N: Tensor, mask_N: Tensor) -> PartialMetric:
    """Return the part of a mean over valid tokens: their sum."""
    return PartialMetric(PartialReduction.TOKENS, torch.where(mask_N, values_N, 0).sum())


def largest(values_N: Tensor, mask_N: Tensor) -> PartialMetric:
    """Return the largest valid value, or minus infinity if none is valid."""
    return PartialMetric(PartialReduction.MAX, torch.where(mask_N, values_N, -torch.inf).amax())


def smallest(values_N: Tensor, mask_N: Tensor) -> PartialMetric:
    """Return the smallest valid value, or infinity if none is valid."""
    return PartialMetric(PartialReduction.MIN, torch.where(mask_N, values_N, torch.inf).amin())
