"""What other libraries compute by default, written out of their sources on padded matrices.

Nothing of ``offbeat`` is called here. Each function names the file and version that it was read in.
"""

from collections.abc import Callable

import torch
from papers import PaddedBatch, ppo, standardised
from torch import Tensor


def trl_vllm(b: PaddedBatch) -> Tensor:
    """Return the loss of ``trl/trainer/grpo_trainer.py``, TRL 1.16.0, with ``use_vllm=True``.

    ``loss_type="dapo"``, ``vllm_importance_sampling_mode="sequence_mask"`` and
    ``vllm_importance_sampling_clip_max=3.0``: the product of a sequence's ratios is its weight, and
    0 above 3; what is masked still counts. TRL adds 1e-4 to the deviation of rewards, not 1e-6.
    """
    product = ((b.old - b.mu) * b.mask).sum(-1, keepdim=True).exp()
    weight = torch.where(product > 3.0, torch.zeros_like(product), product)
    r = (b.logp - b.old).exp()
    return -(weight * ppo(r, standardised(b), 0.2, 0.2) * b.mask).sum() / b.mask.sum()


def verl_default(b: PaddedBatch) -> Tensor:
    """Return ``compute_policy_loss_vanilla`` of ``verl/trainer/ppo/core_algos.py``, verl 0.10.0.dev.

    Commit 1dda039. ``verl/trainer/config/actor/actor.yaml``: ``clip_ratio_c=3``, ``token-mean``.
    """
    r, a = (b.logp - b.old).exp(), standardised(b)
    clipped = torch.max(-a * r, -a * r.clamp(0.8, 1.2))
    losses = torch.where(a < 0, torch.min(-a * 3.0, clipped), clipped)
    return (losses * b.mask).sum() / b.mask.sum()


def nemo_rl_default(b: PaddedBatch) -> Tensor:
    """Return the loss of ``nemo_rl/algorithms/loss/loss_functions.py``, NeMo-RL 7ea279a.

    ``examples/configs/grpo_math_1B.yaml``; baseline and deviation are those of
    ``calculate_baseline_and_std_per_prompt`` in ``nemo_rl/algorithms/utils.py``, the penalty that of
    ``calculate_kl`` there.
    """
    a = torch.zeros_like(b.rewards)
    for p, group in enumerate(b.rewards):
        for g, reward in enumerate(group):
            others = torch.cat([group[:g], group[g + 1 :]])
            std = others.std()
            a[p, g] = (reward - others.mean()) / (std + 1e-6 if std > 0 else 1.0)
    r, d = (b.logp - b.old).exp(), b.ref - b.logp
    weight = (b.logp - b.logp.detach()).exp()
    kl = (weight * (d.exp() - 1 - d)).clamp(-10, 10)
    losses = -ppo(r, b.rows(a), 0.2, 0.2) + 0.01 * kl
    return (losses * b.mask).sum() / b.mask.sum()


PEERS: dict[str, Callable[[PaddedBatch], Tensor]] = {
    each.__name__: each for each in (trl_vllm, verl_default, nemo_rl_default)
}
