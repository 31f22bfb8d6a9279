"""Estimators of the KL divergence between two policies from sampled tokens."""

from torch import Tensor

from offbeat.algorithms.tokens import LOG_RATIO_LIMIT


def kl_penalty(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Return per-token estimates of ``KL(policy || reference)`` from tokens of the policy.

    With ``d = reference - logprob``, clamped to ``LOG_RATIO_LIMIT``; names and variances:
    joschu.net/blog/kl-approx.html.

    ======  =====================  ============================================================
    kind    value                  as an estimate; as a loss term
    ======  =====================  ============================================================
    ``k1``  ``-d``                 unbiased, of either sign; its gradient is zero on average
    ``k2``  ``d ** 2 / 2``         biased, never negative; pulls as KL(policy || reference) does
    ``k3``  ``exp(d) - d - 1``     unbiased, never negative; pulls as KL(reference || policy) does
    ======  =====================  ============================================================

    The right-hand side holds on policy. Both arguments and the result are [N], one value per token.
    """
    difference = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    return difference.exp() - difference - 1
