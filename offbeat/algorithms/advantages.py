"""How a sample's reward compares with its group's. Plain Python: the controller runs it.

Every estimator maps the rewards of one prompt group to one advantage a sample, in the same order.
Rewards must be finite; producers vouch for that. Two rules hold for all of them: a group whose
rewards are all equal gets exact zeros, and so does a group of a single sample, which has nothing to
be compared with. Legend: G samples of the group, ``r`` their rewards, ``mean`` over the group.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

Rewards = tuple[float, ...]
Advantages = tuple[float, ...]

GRPO_EPS: Final = 1e-6  # keeps a nearly constant group finite; rewards are of order one


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A named formula, and what has to be fetched before it can be evaluated."""

    name: str
    formula: Callable[[Rewards], Advantages]
    needs: Literal["tags"] = "tags"  # rewards ride with the receipt; no payload is read

    def __call__(self, rewards: Rewards) -> Advantages:
        """One advantage a sample, in the order of ``rewards``."""
        if not rewards or min(rewards) == max(rewards):
            return (0.0,) * len(rewards)
        return self.formula(rewards)


def grpo(rewards: Rewards) -> Advantages:
    """``(r - mean) / (std + 1e-6)`` with the sample standard deviation (divisor ``G - 1``).

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. The paper leaves the divisor open; ``G - 1`` is
    what TRL and verl use. Dividing gives a nearly solved prompt the weight of an even one.
    """
    centred = grpo_no_std(rewards)
    std = math.sqrt(math.fsum(each * each for each in centred) / (len(rewards) - 1))
    return tuple(each / (std + GRPO_EPS) for each in centred)


def grpo_no_std(rewards: Rewards) -> Advantages:
    """``r - mean``: GRPO without its division by the standard deviation."""
    mean = math.fsum(rewards) / len(rewards)
    return tuple(each - mean for each in rewards)


def dr_grpo(rewards: Rewards) -> Advantages:
    """``r - mean``: the advantage of Dr. GRPO, arXiv:2503.20783, section 3.2.

    Dr. GRPO removes two biases of GRPO. The division by the standard deviation is removed here,
    which makes this ``grpo_no_std`` by formula. The division of each response's loss by its own
    length belongs to the loss: ``normalize="tokens"`` divides the sum over all tokens of the step
    by one number, the same for every response, so long and short responses weigh alike a token. The
    paper divides by a constant instead, which differs by a factor common to the whole step.
    ``normalize="sequences"`` would bring the length bias back.
    """
    return grpo_no_std(rewards)


def rloo(rewards: Rewards) -> Advantages:
    """``r_i`` minus the mean of the other samples: ``G / (G - 1) * (r_i - mean)``.

    Leave-one-out REINFORCE, Kool et al. 2019 and arXiv:2402.14740, section 2.2. Unbiased, because a
    sample's baseline does not depend on the sample.
    """
    scale = len(rewards) / (len(rewards) - 1)
    return tuple(scale * each for each in grpo_no_std(rewards))


def reinforce_pp_baseline(rewards: Rewards) -> Advantages:
    """``r - mean``: the baseline of REINFORCE++, arXiv:2501.03262, without its last division.

    The paper goes on to divide by the standard deviation of these differences over the whole batch.
    That is one factor for a whole step, and a step's groups are trained before all of them are
    known, so it is left out: AdamW's update does not depend on a constant factor, but
    ``max_grad_norm`` and the weight of a KL penalty do, and a step of little spread weighs less
    here. By formula this is ``grpo_no_std``.
    """
    return grpo_no_std(rewards)


def pass_at_k(rewards: Rewards, k: int) -> Advantages:
    """How much better the best of k tries is with a sample among them than without, times k.

    ``k * (mean of max(r[I]) over the I with i  -  mean of max(r[J]) over the J without i)``, where I
    and J are the subsets of k samples. The mean over samples of this times the gradient of a
    sample's logprob is an unbiased estimate of the gradient of ``E[max of k]``, which is pass@k for
    rewards of 0 and 1: the second term does not depend on the sample. Reward transforms for max@k
    over subsets, with a leave-one-out baseline: PKPO, arXiv:2505.15201. ``k = 1`` is ``rloo``.

    A group of G samples has tries without one of them only for k < G; a larger k counts as G - 1.
    O(G log G).
    """
    size = len(rewards)
    k = min(k, size - 1)
    order = sorted(range(size), key=rewards.__getitem__)
    ranked = [rewards[i] for i in order]
    subsets = math.comb(size - 1, k - 1)
    others = math.comb(size - 1, k)
    # The max of a subset is its member of highest rank j: C(j, k-1) subsets have it, C(j-1, k-2) of
    # them with a given sample of lower rank.
    best = math.fsum(r * (math.comb(j, k - 1) / others) for j, r in enumerate(ranked))
    advantages, above = [0.0] * size, 0.0
    for j in reversed(range(size)):
        mean_with = ranked[j] * (math.comb(j, k - 1) / subsets) + above
        mean_without = best - mean_with * (subsets / others)
        advantages[order[j]] = k * (mean_with - mean_without)
        if j and k > 1:
            above += ranked[j] * (math.comb(j - 1, k - 2) / subsets)
    return tuple(advantages)


def estimator(name: str, *, pass_k: int) -> AdvantageEstimator:
    """The estimator a recipe names.

    Args:
        name: One of ``ESTIMATORS``, or ``pass_at_k``.
        pass_k: The k of ``pass_at_k``; no other reads it.
    """
    if name == pass_at_k.__name__:
        return AdvantageEstimator(name, partial(pass_at_k, k=pass_k))
    return ESTIMATORS[name]


ESTIMATORS: Final[Mapping[str, AdvantageEstimator]] = MappingProxyType(
    {
        formula.__name__: AdvantageEstimator(formula.__name__, formula)
        for formula in (grpo, grpo_no_std, dr_grpo, rloo, reinforce_pp_baseline)
    }
)
"""Estimators without parameters, by the name a recipe uses."""
