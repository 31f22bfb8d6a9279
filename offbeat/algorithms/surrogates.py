"""Surrogate losses per token, before weighting and summation. One function per surrogate.

Each takes valid tokens and returns their loss, [N], with the ratio it used and the tokens that a
bound clipped. Legend: N tokens, S sequences; ``A`` the advantage, ``r = exp(logprob - old)``.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.algorithms.tokens import ValidTokens, ratio
from offbeat.config.sections.loss import (
    ClipRangeLossConfig,
    PessimisticLossConfig,
    SapoLossConfig,
)

LOW, HIGH, DUAL = "clip_fraction_low", "clip_fraction_high", "clip_fraction_dual"


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Loss of each token. Values at invalid tokens are finite and meaningless."""

    loss_N: Tensor  # carries the gradient
    ratio_N: Tensor | None = None  # importance ratio, without gradient; None if unused
    # Bool: the tokens that each bound clips
    bounded_N: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def clipped(tokens: ValidTokens, config: PessimisticLossConfig) -> Surrogate:
    """Compute ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``: PPO's clipped objective.

    Tokens beyond their bound have no gradient. PPO, arXiv:1707.06347, equation 7. Separate bounds
    are DAPO's clip-higher, arXiv:2503.14476. With ``dual_clip = c`` a token of negative advantage
    stops at ``r = c`` too: see ``_pessimistic``.
    """
    return _pessimistic(ratio(tokens.logprobs_N - tokens.old_N), tokens.advantages_N, config)


def sequence_clipped(tokens: ValidTokens, config: PessimisticLossConfig) -> Surrogate:
    """Compute ``clipped`` with one ratio for all tokens of a sequence: their geometric mean.

    ``s = exp(mean over the sequence's valid tokens of logprob - old)``. GSPO, arXiv:2507.18071;
    its objective, equation 5, is a mean over sequences: ``normalize="sequences"``. A mean moves
    less than one token does: the paper's bounds are 3e-4 and 4e-4. The gradient reaches every valid
    token of the sequence through ``s``.
    """
    mean_S = tokens.sequence_sums(tokens.logprobs_N - tokens.old_N) / tokens.lengths_S
    return _pessimistic(ratio(mean_S)[tokens.sequence_N], tokens.advantages_N, config)


def bounded_weight(tokens: ValidTokens, config: ClipRangeLossConfig) -> Surrogate:
    """Compute ``-clip(r, 1 - clip_low, 1 + clip_high) A logprob``.

    There is no gradient through the clipped ratio. CISPO, arXiv:2506.13585 (MiniMax-M1), equations
    4 and 5: bounds limit a token's weight and never remove its gradient. ``clip_low = 1`` is no
    lower bound, as in the paper's training. The value of this loss is not meaningful; its gradient
    is.
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
    """Compute ``-(4 / tau) sigmoid(tau (r - 1)) A``: a gate in the place of the clip range.

    ``tau`` is ``tau_positive`` where A > 0 and ``tau_negative`` elsewhere. The gradient is that of
    ``r A`` times ``4 p (1 - p)``, ``p`` the sigmoid: 1 at ``r = 1``, falling on both sides, nowhere
    0. SAPO, arXiv:2511.20347, equations 5 and 6; its objective is a mean of sequence means.
    """
    ratio_N = ratio(tokens.logprobs_N - tokens.old_N)
    tau_N = torch.full_like(tokens.advantages_N, config.tau_negative)
    tau_N = torch.where(tokens.advantages_N > 0, config.tau_positive, tau_N)
    gate_N = 4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1))
    return Surrogate(-gate_N * tokens.advantages_N, ratio_N.detach())


def likelihood(tokens: ValidTokens) -> Surrogate:
    """Compute ``-logprob``: imitate every trained token, whatever its advantage."""
    return Surrogate(-tokens.logprobs_N)


def _pessimistic(ratio_N: Tensor, advantages_N: Tensor, config: PessimisticLossConfig) -> Surrogate:
    """Compute PPO's lower bound on ``r A``, with an optional floor below it.

    The bound leaves ``r A`` unbounded where A < 0 and r is large: a token that is now far more
    likely than when it was sampled. ``max(bound, c A)`` there, with ``c = dual_clip > 1``, is
    dual-clip PPO, arXiv:1912.09729, equation 5.
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
