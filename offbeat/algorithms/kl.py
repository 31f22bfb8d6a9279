"""Estimates the KL divergence between two policies from sampled tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from offbeat.algorithms.tokens import LOG_RATIO_LIMIT, PartialMetric, ValidTokens, ratio, token_mean
from offbeat.config.sections.loss import PolicyGradientLossConfig


def kl_penalty(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Return per-token estimates of ``KL(policy || reference)`` from tokens of the policy.

    They use ``d = reference - logprob``, clamped to ``LOG_RATIO_LIMIT``. For names and variances,
    see joschu.net/blog/kl-approx.html.

    ======  =====================  ============================================================
    kind    value                  as an estimate; as a loss term
    ======  =====================  ============================================================
    ``k1``  ``-d``                 unbiased, of either sign; its gradient is zero on average
    ``k2``  ``d ** 2 / 2``         biased, never negative; pulls as KL(policy || reference) does
    ``k3``  ``exp(d) - d - 1``     unbiased, never negative; pulls as KL(reference || policy) does
    ======  =====================  ============================================================

    The last column holds on policy. Both arguments and the result are [N], one value per token.
    """
    difference = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    return difference.exp() - difference - 1


def compute_weighted_kl(
    logprobs_N: Tensor, reference_N: Tensor, old_N: Tensor, kind: str
) -> Tensor:
    """Return ``exp(logprob - old)`` times ``kl_penalty``, [N], which has the gradient of the KL.

    The KL is an expectation over tokens of the policy itself. So its gradient has a part for tokens
    that become more likely, which ``kl_penalty`` lacks. At ``old = logprob`` the value equals
    ``kl_penalty``, and the gradient of ``k3`` equals the gradient of ``k2``. DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1; arXiv:2506.09477. If a log-ratio to the reference exceeds
    ``LOG_RATIO_LIMIT``, the token has no gradient, not even through the weight.
    """
    weight_N = ratio(logprobs_N - old_N)
    is_clamped_N = (reference_N - logprobs_N).abs() > LOG_RATIO_LIMIT
    weight_N = torch.where(is_clamped_N, weight_N.detach(), weight_N)
    return weight_N * kl_penalty(logprobs_N, reference_N, kind)


def penalise_kl(tokens: ValidTokens, config: PolicyGradientLossConfig) -> ValidTokens:
    """Return tokens with advantage ``A - kl_reward_coef * (old - reference)``: KL in the reward.

    A token's advantage contains the KL of only this token (discount 0), as in REINFORCE++ with
    baseline in NeMo-RL (``use_kl_in_reward``) and slime (``--kl-coef``). The estimate is ``k1``.
    Its policy gradient is the gradient of KL(policy || reference). arXiv:2501.03262, section 3.2.
    """
    if tokens.reference_N is None or not config.kl_reward_coef:
        return tokens
    kl_N = kl_penalty(tokens.old_N.detach(), tokens.reference_N, "k1")
    return replace(tokens, advantages_N=tokens.advantages_N - config.kl_reward_coef * kl_N)


def reward_kl_metrics(
    tokens: ValidTokens, config: PolicyGradientLossConfig
) -> dict[str, PartialMetric]:
    """Return the mean KL that enters the advantages, or nothing without ``kl_reward_coef``."""
    if tokens.reference_N is None or not config.kl_reward_coef:
        return {}
    kl_N = kl_penalty(tokens.old_N.detach(), tokens.reference_N, "k1")
    return {"train/kl_reward": token_mean(kl_N, tokens.mask_N)}
