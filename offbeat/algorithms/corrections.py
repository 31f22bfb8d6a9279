"""Importance weights, without gradient, for samples from a policy other than the old one.

An engine's logprobs differ slightly from the trainer's, and its weights may be older. If the
trainer computed the old logprobs, ``k = exp(old - generation)`` is the old policy's probability of
a token relative to the engine's. Each correction maps ``k`` to a weight of the token. The
corrections of a recipe are multiplied.

A token dropped by a band has weight 0. With ``count_dropped`` it still counts in the loss's
divisor, so dropping data makes a step smaller. IcePop, AReaL and TRL do this. So do slime since its
PR 1933 (May 2026) and verl in its V1 trainer (June 2026). Without ``count_dropped``, the loss,
including the KL penalty, is the mean over the kept tokens, so dropping data makes a step noisier.
Earlier slime and verl did this.

Decoupled PPO (arXiv:2110.00641; for asynchronous training arXiv:2505.24298, AReaL) combines one of
these corrections with the ratio of ``losses.clipped_pg``. Then ``old`` is the proximal policy: the
trainer's weights when the step begins. ``k`` is the weight between it and the behaviour policy.
Legend: N tokens, S sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.algorithms.tokens import (
    PartialMetric,
    PartialReduction,
    ValidTokens,
    ratio,
    token_mean,
)
from offbeat.config.sections.loss import PolicyGradientLossConfig

Band = tuple[float, float]


class Correction(NamedTuple):
    """Importance weights to multiply the surrogate's loss by, and their metrics."""

    weight_N: Tensor | None  # None: no correction, every weight is 1
    uncounted_N: Tensor | None  # bool, dropped by a band and not counted; None: all count
    metrics: dict[str, PartialMetric]


def correction(tokens: ValidTokens, config: PolicyGradientLossConfig) -> Correction:
    """Return the product of all corrections of ``config``. NaN at a valid token stays NaN."""
    parts, dropped, metrics = list[Tensor](), list[Tensor](), dict[str, PartialMetric]()
    log_k_N = (tokens.old_N - tokens.generation_N).detach()
    if config.tis_cap is not None or config.icepop_band is not None:
        k_N = weight_N = ratio(log_k_N)
        if config.tis_cap is not None:
            weight_N = truncate_weights(k_N, config.tis_cap)
            metrics["train/tis_weight_mean"] = token_mean(weight_N, tokens.mask_N)
        if config.icepop_band is not None:
            out_N = outside(k_N, config.icepop_band)
            dropped.append(out_N)
            weight_N = torch.where(out_N, 0.0, weight_N)
            metrics["train/icepop_masked_fraction"] = token_mean(out_N, tokens.mask_N)
        parts.append(weight_N)
    if config.sequence_band is not None:
        k_S = sequence_ratio(tokens, log_k_N, config.sequence_statistic)
        out_S = outside(k_S, config.sequence_band)
        kept_S = k_S if config.sequence_weights else _one_or_nan(k_S)
        weight_S = torch.where(out_S, 0.0, kept_S)
        parts.append(weight_S[tokens.sequence_N])
        dropped.append(out_S[tokens.sequence_N])
        metrics["train/sequence_masked_fraction"] = PartialMetric(
            PartialReduction.SEQUENCES, (out_S * tokens.sample_share_S).sum()
        )
    if config.sequence_cap is not None:
        k_S = sequence_ratio(tokens, log_k_N, "product")
        weight_N = truncate_weights(k_S, config.sequence_cap)[tokens.sequence_N]
        parts.append(weight_N)
        metrics["train/sequence_weight_mean"] = token_mean(weight_N, tokens.mask_N)
    if config.off_policy_delta is not None:
        drift_S, out_S = off_policy(tokens, config.off_policy_delta)
        parts.append(torch.where(out_S, 0.0, _one_or_nan(drift_S))[tokens.sequence_N])
        dropped.append(out_S[tokens.sequence_N])
        metrics["train/off_policy_masked_fraction"] = PartialMetric(
            PartialReduction.SEQUENCES, (out_S * tokens.sample_share_S).sum()
        )
    return Correction(
        torch.stack(parts).prod(0) if parts else None,
        torch.stack(dropped).any(0) if dropped and not config.count_dropped else None,
        metrics,
    )


def truncate_weights(k: Tensor, cap: float) -> Tensor:
    """Return ``min(k, cap)``: truncated importance sampling (TIS), for tokens [N] or sequences [S].

    For tokens, see fengyao.notion.site/off-policy-rl, and verl since its PR 2953. For sequences
    (with the product of ratios), see richardli.xyz/rl-collapse, part 3, ``decoupled_seq_is`` in
    verl and ``sequence_truncate`` in TRL.
    """
    return k.clamp(max=cap)


def off_policy(tokens: ValidTokens, delta: float) -> tuple[Tensor, Tensor]:
    """Return each sequence's drift from its sampling policy, [S], and whether this drops it.

    The drift is the mean over the sequence's valid tokens of ``generation - logprob``, without
    gradient: how much less likely the trained policy is to write such a token than the engine was.
    A sequence with negative advantage that drifted more than ``delta`` is dropped. This is
    DeepSeek-V3.2's off-policy sequence masking, arXiv:2512.02556, equation 9, with the engine's
    reported logprobs as the old policy. The sign of a sequence's advantage is the sign of its
    summed advantages.
    """
    drift_N = (tokens.generation_N - tokens.logprobs_N).detach()
    drift_S = tokens.sequence_sums(drift_N) / tokens.lengths_S
    return drift_S, (tokens.sequence_sums(tokens.advantages_N) < 0) & (drift_S > delta)


def _one_or_nan(value: Tensor) -> Tensor:
    """Return 1 for each finite value [...], and NaN for any other.

    A broken logprob must not be taken for a valid one.
    """
    return 1.0 + 0.0 * value


def outside(k: Tensor, band: Band) -> Tensor:
    """Return whether ``k`` is outside the closed band. False for NaN.

    For tokens, this is IcePop's mask, arXiv:2510.18855, section 2.3.2. Inside the band, ``k`` is
    the weight. Outside, the token is dropped. IcePop's band is [0.5, 5]. AReaL's
    ``rejection_sampling`` by token and ratio is such a band without a lower bound.
    """
    low, high = band
    return (k < low) | (k > high)


def sequence_ratio(tokens: ValidTokens, log_k_N: Tensor, statistic: str) -> Tensor:
    """Return one ratio per sequence, [S]: the product or geometric mean of its tokens' ratios.

    If the ratio is outside the band, the whole sequence is dropped. The product is the true ratio
    of the sequence, but for long sequences it is outside any band. If it is also the weight of the
    kept sequences (``sequence_weights``), this is masked importance sampling (MIS). The geometric
    mean does not depend on length and is used only for rejection. See richardli.xyz/rl-collapse,
    part 3. Trust Region Masking, arXiv:2512.23075, analyses dropping whole sequences by a different
    criterion. A sequence without valid tokens has ratio 1.
    """
    sums_S = tokens.sequence_sums(log_k_N)
    return ratio(sums_S if statistic == "product" else sums_S / tokens.lengths_S)
