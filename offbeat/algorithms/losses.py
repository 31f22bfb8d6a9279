"""Losses over packed tokens, as sums: the caller divides once, when a step is complete.

A loss is a surrogate of each token (``surrogates``), times a weight for off-policy data
(``corrections``), times a weight that makes the sum one over tokens or over sequences; plus a KL
penalty (``kl``) and less an entropy bonus, which no correction weighs. ``divisors`` computes the
divisor of a step's sums. Common to all losses:

- Invalid tokens are replaced before anything is computed from them, so NaN and infinity there reach
  neither the sums nor the gradient. A NaN at a valid token makes the sum NaN.
- Log-ratios are clamped to ``LOG_RATIO_LIMIT``.
- Sums do not depend on the order of tokens or sequences, nor, up to rounding, on how sequences are
  spread over calls.

Legend: N tokens, S sequences.
"""

from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from offbeat.algorithms.corrections import Correction, correction
from offbeat.algorithms.diagnostics import spread
from offbeat.algorithms.distillation import distilled, teacher_metrics
from offbeat.algorithms.divisors import divisor_parts
from offbeat.algorithms.kl import kl_penalty, penalised, reward_kl_metrics, weighted_kl
from offbeat.algorithms.metrics import PartialMetric, PartialReduction
from offbeat.algorithms.surrogates import (
    Surrogate,
    bounded_weight,
    clipped,
    likelihood,
    sequence_clipped,
    soft_gated,
)
from offbeat.algorithms.tokens import (
    Loss,
    LossSums,
    LossTokens,
    ValidTokens,
    largest,
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

__all__ = ["LOSSES", "LossSums", "LossTokens", "clipped_pg"]


def clipped_pg(tokens: LossTokens, config: PessimisticLossConfig) -> LossSums:
    """Compute the clipped policy gradient of PPO, GRPO and DAPO: ``surrogates.clipped``.

    For each valid token, with ratio ``r = exp(logprob - old)`` and advantage ``A``::

        w * -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_coef * KL(logprob, reference)

    With a teacher, or a KL penalty in the reward, ``A`` has its part for each token:
    ``distillation.distilled``, ``kl.penalised``. ``w`` is the
    product of the recipe's corrections. ``normalize="tokens"`` is DAPO's token-level
    loss (arXiv:2503.14476, section 3.3), ``"sequences"`` GRPO's mean of means (arXiv:2402.03300),
    ``"constant"`` Dr. GRPO's division by the generation budget (arXiv:2503.20783, section 3.2).
    """
    valid = _with_advantages(tokens, config)
    return _sums(valid, clipped(valid, config), correction(valid, config), tokens, config)


def gspo(tokens: LossTokens, config: PessimisticLossConfig) -> LossSums:
    """Compute ``clipped_pg`` with one ratio per sequence: ``surrogates.sequence_clipped``.

    arXiv:2507.18071.
    """
    valid = _with_advantages(tokens, config)
    return _sums(valid, sequence_clipped(valid, config), correction(valid, config), tokens, config)


def cispo(tokens: LossTokens, config: ClipRangeLossConfig) -> LossSums:
    """Compute a policy gradient with a bounded importance weight: ``surrogates.bounded_weight``.

    arXiv:2506.13585, which normalises over tokens.
    """
    valid = _with_advantages(tokens, config)
    return _sums(valid, bounded_weight(valid, config), correction(valid, config), tokens, config)


def sapo(tokens: LossTokens, config: SapoLossConfig) -> LossSums:
    """Compute a policy gradient behind a smooth gate of the ratio: ``surrogates.soft_gated``.

    arXiv:2511.20347, which averages sequence means.
    """
    valid = _with_advantages(tokens, config)
    return _sums(valid, soft_gated(valid, config), correction(valid, config), tokens, config)


def sft(tokens: LossTokens, config: AnyLossConfig) -> LossSums:
    """Compute the negative log-likelihood of the trained tokens, without any weights."""
    valid = valid_tokens(tokens)
    return _sums(valid, likelihood(valid), Correction(None, None, {}), tokens, config)


def _with_advantages(tokens: LossTokens, config: PolicyGradientLossConfig) -> ValidTokens:
    """Return the valid tokens; their advantages have the parts of teacher and reference."""
    valid = valid_tokens(tokens, config.old_logprobs)
    return penalised(distilled(valid, config), config)


def _sums(
    valid: ValidTokens,
    surrogate: Surrogate,
    corrected: Correction,
    tokens: LossTokens,
    config: AnyLossConfig,
) -> LossSums:
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
        kl_N = weighted_kl(valid.logprobs_N, reference_N, valid.old_N, config.kl_kind)
    else:
        kl_N = kl_penalty(valid.logprobs_N, reference_N, config.kl_kind)
    return kl_N if config.kl_clamp is None else kl_N.clamp(-config.kl_clamp, config.kl_clamp)


def _share(counted: ValidTokens, config: AnyLossConfig) -> Tensor:
    """Return each token's weight in the sum [N]: 1, or its part of its sample's mean.

    0 if invalid.
    """
    one_N = counted.mask_N.to(counted.counts_S.dtype)
    if config.normalize != "sequences":
        return one_N
    weight_S = counted.sample_share_S / counted.lengths_S
    return one_N * weight_S.to(one_N.dtype)[counted.sequence_N]


def _ratio_metrics(surrogate: Surrogate, mask_N: Tensor) -> dict[str, PartialMetric]:
    """Return metrics of the surrogate's ratios, and of the tokens that its bounds clip."""
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
"""Losses by the name a recipe uses."""
