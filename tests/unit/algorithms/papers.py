"""The published losses, each written out of its paper on padded matrices in float64.

Nothing of ``offbeat`` is called here. Legend: P prompts, G samples of each, B = P * G rows, T tokens.
``logp`` is under the weights being trained, ``old`` under those the step begins with, ``mu`` under
those that sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PaddedBatch:
    """Rows of one prompt lie together."""

    logp: Tensor  # [B, T], carries the gradient
    old: Tensor  # [B, T]; the same numbers where the algorithm takes one step on its data
    mu: Tensor  # [B, T]
    mask: Tensor  # [B, T], 1.0 or 0.0
    ref: Tensor  # [B, T], of the frozen reference
    rewards: Tensor  # [P, G]
    budget: int  # most tokens a response may have

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(-1)

    def rows(self, advantages: Tensor) -> Tensor:
        return advantages.reshape(-1, 1)


def ppo(r: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return torch.min(r * a, torch.clip(r, 1 - low, 1 + high) * a)


def standardised(b: PaddedBatch) -> Tensor:
    mean, std = b.rewards.mean(-1, keepdim=True), b.rewards.std(-1, keepdim=True)
    return b.rows((b.rewards - mean) / (std + 1e-6))


def centred(b: PaddedBatch) -> Tensor:
    return b.rows(b.rewards - b.rewards.mean(-1, keepdim=True))


def grpo(b: PaddedBatch) -> Tensor:
    r = (b.logp - b.mu).exp()
    per_response = (ppo(r, standardised(b), 0.2, 0.2) * b.mask).sum(-1) / b.lengths
    return -per_response.mean()


def dr_grpo(b: PaddedBatch) -> Tensor:
    r = (b.logp - b.mu).exp()
    return -((ppo(r, centred(b), 0.2, 0.2) * b.mask).sum(-1) / b.budget).mean()


def dapo(b: PaddedBatch) -> Tensor:
    r = (b.logp - b.mu).exp()
    return -(ppo(r, standardised(b), 0.2, 0.28) * b.mask).sum() / b.lengths.sum()


def gspo(b: PaddedBatch) -> Tensor:
    s = (((b.logp - b.mu) * b.mask).sum(-1, keepdim=True) / b.lengths[:, None]).exp()
    return -ppo(s, standardised(b), 3e-4, 4e-4).mean()


def cispo(b: PaddedBatch) -> Tensor:
    weight = (b.logp - b.mu).exp().clamp(max=5.0).detach()
    return -(weight * standardised(b) * b.logp * b.mask).sum() / b.lengths.sum()


def rloo(b: PaddedBatch) -> Tensor:
    """Its gradient; and its value up to a constant, the advantages cancelling."""
    g = b.rewards.shape[-1]
    others = (b.rewards.sum(-1, keepdim=True) - b.rewards) / (g - 1)
    responses = (b.logp * b.mask).sum(-1, keepdim=True)
    return -(b.rows(b.rewards - others) * responses).mean() / b.budget


def reinforce_pp_baseline(b: PaddedBatch) -> Tensor:
    a = centred(b)
    a = (a - a.mean()) / (a.std(correction=0) + 1e-8)
    r = (b.logp - b.mu).exp()
    return -(ppo(r, a, 0.2, 0.2) * b.mask).sum() / b.lengths.sum()


def tis(b: PaddedBatch) -> Tensor:
    weight = (b.old - b.mu).exp().clamp(max=2.0)
    r = (b.logp - b.old).exp()
    return -(weight * ppo(r, standardised(b), 0.2, 0.28) * b.mask).sum() / b.lengths.sum()


def icepop(b: PaddedBatch) -> Tensor:
    k = (b.old - b.mu).exp()
    m = torch.where((k >= 0.5) & (k <= 5.0), k, torch.zeros_like(k))
    r = (b.logp - b.old).exp()
    per_response = (m * ppo(r, standardised(b), 0.2, 0.2) * b.mask).sum(-1) / b.lengths
    return -per_response.mean()


def mis(b: PaddedBatch) -> Tensor:
    rho = ((b.old - b.mu) * b.mask).sum(-1, keepdim=True).exp()
    kept = b.mask * (rho <= 2.0)
    r = (b.logp - b.old).exp()
    return -(rho * ppo(r, standardised(b), 0.2, 0.28) * kept).sum() / kept.sum()


def geo_mask(b: PaddedBatch) -> Tensor:
    log_rho = b.old - b.mu
    geo = ((log_rho * b.mask).sum(-1, keepdim=True) / b.lengths[:, None]).exp()
    kept = b.mask * ((geo >= 0.99) & (geo <= 1.01))
    r = (b.logp - b.old).exp()
    weight = log_rho.exp().clamp(max=2.0)
    return -(weight * ppo(r, standardised(b), 0.2, 0.28) * kept).sum() / kept.sum()


def decoupled_ppo(b: PaddedBatch) -> Tensor:
    w = (b.old - b.mu).exp()
    w = torch.where(w <= 5.0, w, torch.zeros_like(w))
    r = (b.logp - b.old).exp()
    return -(w * ppo(r, standardised(b), 0.2, 0.2) * b.mask).sum() / b.mask.sum()


def sapo(b: PaddedBatch) -> Tensor:
    r, a = (b.logp - b.mu).exp(), standardised(b)
    tau = torch.where(a > 0, torch.full_like(a, 1.0), torch.full_like(a, 1.05))
    gate = (tau * (r - 1)).sigmoid() * 4 / tau
    per_response = (gate * a * b.mask).sum(-1) / b.lengths
    return -per_response.mean()


PAPERS: dict[str, Callable[[PaddedBatch], Tensor]] = {
    each.__name__: each
    for each in (
        grpo,
        dr_grpo,
        dapo,
        gspo,
        cispo,
        rloo,
        reinforce_pp_baseline,
        tis,
        icepop,
        mis,
        geo_mask,
        decoupled_ppo,
        sapo,
    )
}
