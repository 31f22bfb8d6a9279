"""Losses over packed tokens, as sums: the caller divides once, when a step is complete.

A loss is the sum over tokens of the surrogate (``Surrogate``) times two weights. One corrects for
off-policy data (``corrections``). The other makes the result a sum over tokens or over sequences. A
KL penalty (``kl``) is added and an entropy bonus is subtracted. Corrections do not apply to these
two. ``divisors`` computes the divisor of a step's sums. Common to all losses:

- Invalid tokens are replaced before anything is computed from them, so NaN and infinity there reach
  neither the sums nor the gradient. A NaN at a valid token makes the sum NaN.
- Log-ratios are clamped to ``LOG_RATIO_LIMIT``.
- Sums do not depend on the order of tokens or sequences, nor, up to rounding, on how sequences are
  spread over calls.

Legend: N tokens, S sequences, ``A`` advantage, ``r = exp(logprob - old)``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from offbeat.algorithms.corrections import Correction, correction
from offbeat.algorithms.diagnostics import spread
from offbeat.algorithms.divisors import divisor_parts
from offbeat.algorithms.kl import compute_weighted_kl, kl_penalty, penalise_kl, reward_kl_metrics
from offbeat.algorithms.tokens import (
    LOG_RATIO_LIMIT,
    Loss,
    LossSums,
    LossTokens,
    PartialMetric,
    PartialReduction,
    ValidTokens,
    largest,
    ratio,
    smallest,
    token_mean,
    valid_tokens,
)
from offbeat.config.sections.loss import (
    AnyLossConfig,
    ClipRangeLossConfig,
    PessimisticLossConfig,
    PolicyGradientLossConfig,
    SapoLossConfig,
)


def distill(tokens: ValidTokens, config: PolicyGradientLossConfig) -> ValidTokens:
    """Return tokens with advantage ``reward_coef * A + coef * (teacher - old)``.

    In expectation over tokens of the policy, ``old - teacher`` is the reverse KL of the next token
    (GKD, arXiv:2306.13649, and MiniLLM, arXiv:2306.08543). A token's advantage contains the
    difference of only this token (discount 0). Without a teacher, the tokens are unchanged. The
    difference has no gradient. It is clamped to ``LOG_RATIO_LIMIT``, so that a token that the
    teacher would never write does not dominate the step.
    """
    if tokens.teacher_N is None:
        return tokens
    taught_N = -config.teacher_coef * _gap(tokens, tokens.teacher_N)
    rewarded_N = config.teacher_reward_coef * tokens.advantages_N
    return replace(tokens, advantages_N=rewarded_N + taught_N)


def teacher_metrics(tokens: ValidTokens) -> dict[str, PartialMetric]:
    """Return the reverse KL to the teacher, estimated from samples. Empty without a teacher."""
    if tokens.teacher_N is None:
        return {}
    return {"train/teacher_kl": token_mean(_gap(tokens, tokens.teacher_N), tokens.mask_N)}


def _gap(tokens: ValidTokens, teacher_N: Tensor) -> Tensor:
    """Return the clamped log-ratio of policy and teacher [N], without gradient."""
    gap_N = tokens.old_N.detach() - teacher_N
    return gap_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


LOW, HIGH, DUAL = "clip_fraction_low", "clip_fraction_high", "clip_fraction_dual"


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Loss of each token. Values at invalid tokens are finite and meaningless."""

    loss_N: Tensor  # carries the gradient
    ratio_N: Tensor | None = None  # importance ratio, without gradient; None if unused
    # Bool: tokens clipped by each bound
    bounded_N: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def clip_surrogate(tokens: ValidTokens, config: PessimisticLossConfig) -> Surrogate:
    """Compute ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``: PPO's clipped objective.

    Tokens beyond their bound have no gradient. PPO, arXiv:1707.06347, equation 7. Separate bounds
    are DAPO's clip-higher, arXiv:2503.14476. With ``dual_clip = c``, a token with negative
    advantage also has no gradient beyond ``r = c`` (``_pessimistic``).
    """
    return _pessimistic(ratio(tokens.logprobs_N - tokens.old_N), tokens.advantages_N, config)


def sequence_clipped(tokens: ValidTokens, config: PessimisticLossConfig) -> Surrogate:
    """Compute ``clip_surrogate`` with one ratio for all tokens of a sequence: their geometric mean.

    ``s = exp(mean over the sequence's valid tokens of logprob - old)``. GSPO, arXiv:2507.18071. Its
    objective, equation 5, is a mean over sequences, which is ``normalize="sequences"``. A mean
    varies less than a single token's ratio, so the paper's bounds are 3e-4 and 4e-4. Through ``s``,
    the gradient reaches every valid token of the sequence.
    """
    mean_S = tokens.sequence_sums(tokens.logprobs_N - tokens.old_N) / tokens.lengths_S
    return _pessimistic(ratio(mean_S)[tokens.sequence_N], tokens.advantages_N, config)


def bound_weight(tokens: ValidTokens, config: ClipRangeLossConfig) -> Surrogate:
    """Compute ``-clip(r, 1 - clip_low, 1 + clip_high) A logprob``.

    The clipped ratio is a constant for the gradient. CISPO, arXiv:2506.13585 (MiniMax-M1),
    equations 4 and 5: bounds limit a token's weight, but never remove its gradient. ``clip_low =
    1`` means no lower bound, as in the paper's training. Only the gradient of this loss is
    meaningful, not its value.
    """
    ratio_N = ratio(tokens.logprobs_N.detach() - tokens.old_N)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    weight_N = ratio_N.clamp(low, high)
    return Surrogate(
        -weight_N * tokens.advantages_N * tokens.logprobs_N,
        ratio_N,
        {LOW: ratio_N < low, HIGH: ratio_N > high},
    )


def soft_gated(tokens: ValidTokens, config: SapoLossConfig) -> Surrogate:
    """Compute ``-(4 / tau) sigmoid(tau (r - 1)) A``: a gate instead of the clip range.

    ``tau`` is ``tau_positive`` if A > 0, else ``tau_negative``. The gradient is the gradient of ``r
    A`` times ``4 p (1 - p)``, where ``p`` is the sigmoid. This factor is 1 at ``r = 1``, falls on
    both sides, and is never 0. SAPO, arXiv:2511.20347, equations 5 and 6. Its objective is a mean
    of sequence means.
    """
    ratio_N = ratio(tokens.logprobs_N - tokens.old_N)
    tau_N = torch.full_like(tokens.advantages_N, config.tau_negative)
    tau_N = torch.where(tokens.advantages_N > 0, config.tau_positive, tau_N)
    gate_N = 4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1))
    return Surrogate(-gate_N * tokens.advantages_N, ratio_N.detach())


def likelihood(tokens: ValidTokens) -> Surrogate:
    """Compute ``-logprob``: imitate every trained token, independent of its advantage."""
    return Surrogate(-tokens.logprobs_N)


def _pessimistic(ratio_N: Tensor, advantages_N: Tensor, config: PessimisticLossConfig) -> Surrogate:
    """Compute PPO's lower bound on ``r A``, with an optional floor below it.

    If A < 0 and r is large (the token is now far more likely than when it was sampled), PPO's bound
    leaves ``r A`` unbounded. Dual-clip PPO, arXiv:1912.09729, equation 5, uses ``max(bound, c A)``
    there, with ``c = dual_clip > 1``.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    objective_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    values_N = ratio_N.detach()
    bounded = {
        LOW: (values_N < low) & (advantages_N < 0),
        HIGH: (values_N > high) & (advantages_N > 0),
    }
    if config.dual_clip is not None:
        floor_N = torch.maximum(objective_N, config.dual_clip * advantages_N)
        objective_N = torch.where(advantages_N < 0, floor_N, objective_N)
        bounded[DUAL] = (values_N > config.dual_clip) & (advantages_N < 0)
    return Surrogate(-objective_N, values_N, bounded)


__all__ = ["LOSSES", "LossSums", "LossTokens", "clipped_pg"]


def clipped_pg(tokens: LossTokens, config: PessimisticLossConfig) -> LossSums:
    """Compute the clipped policy gradient of PPO, GRPO and DAPO: ``clip_surrogate``.

    For each valid token, with ratio ``r = exp(logprob - old)`` and advantage ``A``::

        w * -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_coef * KL(logprob, reference)

    With a teacher, or a KL penalty in the reward, ``A`` includes a part for each token:
    ``distill``, ``kl.penalise_kl``. ``w`` is the product of the recipe's corrections.
    ``normalize="tokens"`` is DAPO's token-level loss (arXiv:2503.14476, section 3.3),
    ``"sequences"`` is GRPO's mean of means (arXiv:2402.03300), and ``"constant"`` is Dr. GRPO's
    division by the generation budget (arXiv:2503.20783, section 3.2).
    """
    valid = with_advantages(tokens, config)
    return add_up(valid, clip_surrogate(valid, config), correction(valid, config), tokens, config)


def gspo(tokens: LossTokens, config: PessimisticLossConfig) -> LossSums:
    """Compute ``clipped_pg`` with one ratio per sequence: ``sequence_clipped``.

    arXiv:2507.18071.
    """
    valid = with_advantages(tokens, config)
    return add_up(valid, sequence_clipped(valid, config), correction(valid, config), tokens, config)


def cispo(tokens: LossTokens, config: ClipRangeLossConfig) -> LossSums:
    """Compute a policy gradient with a bounded importance weight: ``bound_weight``.

    arXiv:2506.13585, which normalises over tokens.
    """
    valid = with_advantages(tokens, config)
    return add_up(valid, bound_weight(valid, config), correction(valid, config), tokens, config)


def sapo(tokens: LossTokens, config: SapoLossConfig) -> LossSums:
    """Compute a policy gradient with a smooth gate of the ratio: ``soft_gated``.

    arXiv:2511.20347, which averages sequence means.
    """
    valid = with_advantages(tokens, config)
    return add_up(valid, soft_gated(valid, config), correction(valid, config), tokens, config)


def sft(tokens: LossTokens, config: AnyLossConfig) -> LossSums:
    """Compute the negative log-likelihood of the trained tokens, without any weights."""
    valid = valid_tokens(tokens)
    return add_up(valid, likelihood(valid), Correction(None, None, {}), tokens, config)


def with_advantages(tokens: LossTokens, config: PolicyGradientLossConfig) -> ValidTokens:
    """Return the valid tokens. Their advantages include the parts of teacher and reference."""
    valid = valid_tokens(tokens, config.old_logprobs)
    return penalise_kl(distill(valid, config), config)


def add_up(
    valid: ValidTokens,
    surrogate: Surrogate,
    corrected: Correction,
    tokens: LossTokens,
    config: AnyLossConfig,
) -> LossSums:
    """Add weights, penalties, metrics and divisor to a surrogate: the common part of all losses."""
    mask_N, counted = valid.mask_N, valid
    if corrected.uncounted_N is not None:
        counted = valid.without(corrected.uncounted_N)
    share_N = _share(counted, config)
    policy_N = surrogate.loss_N
    if corrected.weight_N is not None:
        policy_N = policy_N * corrected.weight_N
    loss = policy = (policy_N * share_N).sum()
    metrics = corrected.metrics | _ratio_metrics(surrogate, mask_N) | teacher_metrics(valid)
    if isinstance(config, PolicyGradientLossConfig):
        metrics |= reward_kl_metrics(valid, config)
    was_drawn = tokens.generation_N is not None
    if was_drawn:
        metrics |= _gap_metrics(valid)
    metrics["train/policy_loss"] = PartialMetric(PartialReduction.LOSS, policy.detach())
    if valid.reference_N is not None and config.kl_coef > 0:
        kl_N = _kl(valid, valid.reference_N, config)
        loss = loss + config.kl_coef * (kl_N * share_N).sum()
        metrics["train/kl_reference"] = token_mean(kl_N.detach(), mask_N)
    if valid.entropy_N is not None:
        metrics["train/entropy"] = token_mean(valid.entropy_N.detach(), mask_N)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * (valid.entropy_N * share_N).sum()
    elif config.entropy_coef > 0:
        raise AssertionError(f"entropy_coef={config.entropy_coef} without entropies")
    bounded_N = reduce(torch.logical_or, surrogate.bounded_N.values(), torch.zeros_like(mask_N))
    by_age = None
    if was_drawn and tokens.staleness_N is not None:
        by_age = spread(valid, tokens.staleness_N, bounded_N)
    return LossSums(loss, metrics, divisor_parts(valid, counted, config), by_age)


def _kl(valid: ValidTokens, reference_N: Tensor, config: AnyLossConfig) -> Tensor:
    """Return each token's KL to the reference [N], bounded by ``kl_clamp``."""
    if isinstance(config, PolicyGradientLossConfig) and config.kl_gradient == "unbiased":
        kl_N = compute_weighted_kl(valid.logprobs_N, reference_N, valid.old_N, config.kl_kind)
    else:
        kl_N = kl_penalty(valid.logprobs_N, reference_N, config.kl_kind)
    return kl_N if config.kl_clamp is None else kl_N.clamp(-config.kl_clamp, config.kl_clamp)


def _share(counted: ValidTokens, config: AnyLossConfig) -> Tensor:
    """Return each token's weight in the sum [N]: 1, or its share in its sample's mean.

    It is 0 if the token is invalid.
    """
    one_N = counted.mask_N.to(counted.counts_S.dtype)
    if config.normalize != "sequences":
        return one_N
    weight_S = counted.sample_share_S / counted.lengths_S
    return one_N * weight_S.to(one_N.dtype)[counted.sequence_N]


def _ratio_metrics(surrogate: Surrogate, mask_N: Tensor) -> dict[str, PartialMetric]:
    """Return metrics of the surrogate's ratios, and of tokens clipped by its bounds."""
    if surrogate.ratio_N is None:
        return {}
    return {
        "train/ratio_mean": token_mean(surrogate.ratio_N, mask_N),
        "train/ratio_min": smallest(surrogate.ratio_N, mask_N),
        "train/ratio_max": largest(surrogate.ratio_N, mask_N),
        **{
            f"train/{name}": token_mean(is_clipped, mask_N)
            for name, is_clipped in surrogate.bounded_N.items()
        },
    }


def _gap_metrics(valid: ValidTokens) -> dict[str, PartialMetric]:
    """Return metrics of the gap between the trained and the sampling policy, in nats per token."""
    logprobs_N, generation_N = valid.logprobs_N.detach(), valid.generation_N
    gap_N, kl_N = (logprobs_N - generation_N).abs(), kl_penalty(generation_N, logprobs_N, "k3")
    return {
        "off_policy/logprob_gap_mean": token_mean(gap_N, valid.mask_N),
        "off_policy/logprob_gap_max": largest(gap_N, valid.mask_N),
        "off_policy/behaviour_kl": token_mean(kl_N, valid.mask_N),
    }


LOSSES: Final[Mapping[str, Loss]] = MappingProxyType(
    {"clipped_pg": clipped_pg, "gspo": gspo, "cispo": cispo, "sapo": sapo, "sft": sft}
)
"""Losses by the name that a recipe uses."""
