"""Inputs and outputs of a loss. Legend: N tokens, S sequences.

Tokens are on one flat axis, whatever the shape of their microbatch. All tokens of a sequence are in
the same call. A sequence is a sample, or one branch of a sample whose other branches may be in other
calls: it then counts for its share of the sample's tokens, so that the sample counts as one.

Reductions of partial metrics to metrics of a whole step.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from tensordict import TensorClass
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


LOG_RATIO_LIMIT: Final = 20.0
"""Bound on the absolute value of log-ratios: ``exp`` stays finite in float32 and bfloat16."""


class LossTokens(TensorClass["nocast"]):
    """Per-token inputs of a loss: a TensorDict whose fields are attributes, of batch size [].

    Values where ``mask_N`` is False may be anything, NaN too.
    """

    logprobs_N: Tensor  # under the weights being trained; carries the gradient
    old_N: Tensor  # denominator of the importance ratio
    generation_N: Tensor | None  # as the engine reported them; None: no engine drew the tokens
    reference_N: Tensor | None  # of the frozen reference; None without a KL penalty
    advantages_N: Tensor
    mask_N: Tensor  # bool; True where the token is trained
    sequence_N: Tensor  # int64 in [0, sequences)
    sequences: int
    staleness_N: Tensor | None = None  # int; weight versions behind the trainer; None: not known
    teacher_N: Tensor | None = None  # of the frozen teacher; None without one
    sample_share_S: Tensor | None = (
        None  # float64; trained tokens over those of the sample; None: 1
    )
    # Of the distribution that each token is a draw of, under the trained weights, with its
    # gradient; None: not known
    entropy_N: Tensor | None = None

    def sequence_sums(self, values_N: Tensor) -> Tensor:
        """Return the sum of each sequence's trained tokens; [N] -> [S]."""
        return sum_sequences(values_N, self.mask_N, self.sequence_N, self.sequences)


@dataclass(frozen=True, slots=True)
class LossSums:
    """Loss summed over tokens or over sequence means, by the config; and the parts of its divisor."""

    loss: Tensor  # scalar, carries the gradient
    metrics: dict[str, PartialMetric]
    divisor: Tensor  # float64 [3], what ``divisors.denominator`` adds up
    spread: Tensor | None = None  # sums by staleness (``diagnostics``); None: staleness not known


Loss = Callable[[LossTokens, Any], LossSums]
"""A loss takes the config of its own name."""


@dataclass(frozen=True, slots=True)
class ValidTokens:
    """Tokens with 0 in place of the values of invalid ones, so that all are finite."""

    logprobs_N: Tensor
    old_N: Tensor
    generation_N: Tensor
    reference_N: Tensor | None
    advantages_N: Tensor
    mask_N: Tensor  # bool
    sequence_N: Tensor
    counts_S: Tensor  # valid tokens of each sequence
    sample_share_S: Tensor  # float64; what each sequence counts for, where samples count
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
        """Return the sum of each sequence's valid tokens; [N] -> [S]."""
        return sum_sequences(values_N, self.mask_N, self.sequence_N, len(self.counts_S))


def valid_tokens(tokens: LossTokens, old_logprobs: str = "generation") -> ValidTokens:
    """Replace invalid values before anything is computed from them: no NaN reaches a gradient.

    All values take the type of ``logprobs_N``, or float32 if that is shorter: counts have to be exact.
    With ``old_logprobs="current"`` the old policy is the one being trained: its logprobs without
    their gradient.
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
    """Return the sum of each sequence's tokens in the mask; [N] -> [sequences]."""
    masked_N = torch.where(mask_N, values_N, 0.0)
    return masked_N.new_zeros(sequences).index_add(0, sequence_N, masked_N)


def _counts(mask_N: Tensor, sequence_N: Tensor, like_S: Tensor) -> Tensor:
    """Return the number of valid tokens of each sequence, [S]."""
    return torch.zeros_like(like_S).index_add(0, sequence_N, mask_N.to(like_S.dtype))


def ratio(log_ratio: Tensor) -> Tensor:
    """``exp``, with the logarithm clamped to ``LOG_RATIO_LIMIT``; there, its gradient is zero.

    [N] per token or [S] per sequence; the result has the shape of ``log_ratio``.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def token_mean(values_N: Tensor, mask_N: Tensor) -> PartialMetric:
    """Return the part of a mean over valid tokens: their sum."""
    return PartialMetric(PartialReduction.TOKENS, torch.where(mask_N, values_N, 0).sum())


def largest(values_N: Tensor, mask_N: Tensor) -> PartialMetric:
    """Return the largest valid value; minus infinity if none is valid."""
    return PartialMetric(PartialReduction.MAX, torch.where(mask_N, values_N, -torch.inf).amax())


def smallest(values_N: Tensor, mask_N: Tensor) -> PartialMetric:
    """Return the smallest valid value; infinity if none is valid."""
    return PartialMetric(PartialReduction.MIN, torch.where(mask_N, values_N, torch.inf).amin())
