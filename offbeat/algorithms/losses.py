"""Policy losses over packed tokens, as sums: whoever calls divides once, when a step is complete.

Tokens lie in one flat axis, whatever the microbatch they came from looked like. Legend: N tokens,
S sequences. A sequence's tokens are all in the same call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from offbeat.algorithms.metrics import Metric, Reduction
from offbeat.messages.training import LossSpec

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to this on both sides: ``exp`` stays finite in float32 and in bfloat16."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """What a loss reads of each token. Values where ``mask_N`` is False may be anything, NaN too."""

    logprobs_N: Tensor  # under the weights being trained; carries the gradient
    old_N: Tensor  # denominator of the importance ratio
    generation_N: Tensor  # as the engine reported them
    reference_N: Tensor | None  # of the frozen reference; None without a KL penalty
    advantages_N: Tensor
    mask_N: Tensor  # bool; True where the token is trained
    sequence_N: Tensor  # int64 in [0, sequences)
    sequences: int


@dataclass(frozen=True, slots=True)
class LossSums:
    """A loss summed over tokens or over sequence means, by the spec; and the counts to divide by."""

    loss: Tensor  # scalar, carries the gradient
    tokens: Tensor  # scalar float64: valid tokens
    sequences: Tensor  # scalar float64: sequences with a valid token
    metrics: dict[str, Metric]


Loss = Callable[[LossTokens, LossSpec], LossSums]


def clipped_pg(tokens: LossTokens, spec: LossSpec) -> LossSums:
    """The clipped policy gradient, with a truncated importance weight and a KL penalty.

    For each valid token, with ratio ``r = exp(logprob - old)`` and advantage ``A``::

        w * -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_coef * KL(logprob, reference)

    The surrogate is PPO's, arXiv:1707.06347; separate bounds are DAPO's clip-higher,
    arXiv:2503.14476. ``w = min(exp(old - generation), tis_cap)``, without gradient, corrects for an
    engine that samples from a slightly other policy than the trainer computes (truncated importance
    sampling: fengyao.notion.site/off-policy-rl, verl PR 2953); it is 1 without a cap. The KL term
    carries no importance weight.

    Invalid tokens are replaced before anything is computed from them, so NaN and infinity there
    reach neither the sums nor the gradient. Log-ratios are clamped to ``LOG_RATIO_LIMIT``; beyond
    it the gradient of a token is zero. A NaN at a valid token makes the sum NaN.
    """
    mask_N, dtype = tokens.mask_N, tokens.logprobs_N.dtype

    def valid(values_N: Tensor) -> Tensor:
        return torch.where(mask_N, values_N.to(dtype), 0.0)

    logprobs_N, old_N = valid(tokens.logprobs_N), valid(tokens.old_N)
    generation_N, advantages_N = valid(tokens.generation_N), valid(tokens.advantages_N)
    counts_S = torch.zeros(tokens.sequences, dtype=dtype, device=mask_N.device)
    counts_S.index_add_(0, tokens.sequence_N, mask_N.to(dtype))
    weight_N = mask_N.to(dtype)
    if spec.normalize == Reduction.SEQUENCES:
        weight_N = weight_N / counts_S.clamp(min=1)[tokens.sequence_N]

    ratio_N = _ratio(logprobs_N, old_N)
    clipped_N = ratio_N.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    policy_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    metrics = _ratio_metrics(ratio_N.detach(), advantages_N, mask_N, spec)
    metrics |= _gap_metrics(logprobs_N.detach(), generation_N, mask_N)
    if spec.tis_cap is not None:
        tis_N = _ratio(old_N, generation_N).clamp(max=spec.tis_cap)
        policy_N = policy_N * tis_N
        metrics["train/tis_weight_mean"] = Metric(Reduction.TOKENS, (tis_N * mask_N).sum())
    loss = policy_sum = (policy_N * weight_N).sum()
    normalization = Reduction(spec.normalize)
    metrics["train/policy_loss"] = Metric(normalization, policy_sum.detach())
    if tokens.reference_N is not None and spec.kl_coef > 0:
        kl_N = kl_penalty(logprobs_N, valid(tokens.reference_N), spec.kl_kind)
        loss = loss + spec.kl_coef * (kl_N * weight_N).sum()
        metrics["train/kl_reference"] = Metric(Reduction.TOKENS, (kl_N.detach() * mask_N).sum())
    return LossSums(
        loss, counts_S.sum(dtype=torch.float64), (counts_S > 0).sum(dtype=torch.float64), metrics
    )


def kl_penalty(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Per-token estimate of ``KL(policy || reference)`` from tokens of the policy.

    With ``d = reference - logprob``: ``k1 = -d``, unbiased and of either sign; ``k3 = exp(d) - d -
    1``, unbiased, never negative, of lower variance (joschu.net/blog/kl-approx.html). As a loss
    term, the gradient of k1 is zero on average on policy; k3 is the one that pulls.
    """
    difference = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -difference
    return difference.exp() - difference - 1


def denominator(spec: LossSpec, tokens: float, sequences: float) -> float:
    """What the sums of a whole step are divided by, once."""
    return tokens if spec.normalize == Reduction.TOKENS else sequences


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _ratio_metrics(
    ratio_N: Tensor, advantages_N: Tensor, mask_N: Tensor, spec: LossSpec
) -> dict[str, Metric]:
    """Where the ratios lie, and how often a bound takes a token's gradient away."""
    low_N = (ratio_N < 1 - spec.clip_low) & (advantages_N < 0)
    high_N = (ratio_N > 1 + spec.clip_high) & (advantages_N > 0)
    return {
        "train/ratio_mean": Metric(Reduction.TOKENS, (ratio_N * mask_N).sum()),
        "train/ratio_min": Metric(Reduction.MIN, _extremum(ratio_N, mask_N, largest=False)),
        "train/ratio_max": Metric(Reduction.MAX, _extremum(ratio_N, mask_N, largest=True)),
        "train/clip_fraction_low": Metric(Reduction.TOKENS, (low_N & mask_N).sum()),
        "train/clip_fraction_high": Metric(Reduction.TOKENS, (high_N & mask_N).sum()),
    }


def _gap_metrics(logprobs_N: Tensor, generation_N: Tensor, mask_N: Tensor) -> dict[str, Metric]:
    """How far the trained policy is from the one that sampled, in nats a token."""
    gap_N = (logprobs_N - generation_N).abs()
    kl_N = kl_penalty(generation_N, logprobs_N, "k3")
    return {
        "off_policy/logprob_gap_mean": Metric(Reduction.TOKENS, (gap_N * mask_N).sum()),
        "off_policy/logprob_gap_max": Metric(Reduction.MAX, _extremum(gap_N, mask_N, largest=True)),
        "off_policy/behaviour_kl": Metric(Reduction.TOKENS, (kl_N * mask_N).sum()),
    }


def _extremum(values_N: Tensor, mask_N: Tensor, *, largest: bool) -> Tensor:
    """The largest or smallest valid value; minus or plus infinity when none is valid."""
    if largest:
        return torch.where(mask_N, values_N, -torch.inf).amax()
    return torch.where(mask_N, values_N, torch.inf).amin()


LOSSES: Final[Mapping[str, Loss]] = MappingProxyType({"clipped_pg": clipped_pg})
"""Losses by the name a recipe uses."""
