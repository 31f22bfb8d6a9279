"""Advantage estimators over prompt groups. Plain Python: the controller runs it.

Every estimator maps the rewards of one prompt group to one advantage per sample, in the same order.
Three rules hold for all estimators. If all rewards of a group are equal, its advantages are exactly
0. The advantage of a group's only sample is exactly 0, too, because there is nothing to compare it
with. A masked sample gets exactly 0, and the other advantages are the same as without this sample.
For all estimators except ``grpo_loo``, a group's advantages sum to 0, up to rounding, so their mean
over the valid samples of a step is 0 as well.

Legend: G valid samples of the group, ``r`` their rewards, ``mean`` over the group.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from offbeat.messages.failures import OffbeatError

Rewards = tuple[float, ...]
Advantages = tuple[float, ...]

_LARGEST: Final = 3.4028234663852886e38  # float32
GRPO_EPS: Final = 1e-6  # keeps a nearly constant group finite; rewards are of order one


class RewardsNotFinite(OffbeatError):
    """A reward is not finite as float32, although its producer should have refused it: a bug.

    Fix: report it.
    """

    estimator: str
    rewards: Rewards

    def __str__(self) -> str:
        places = [place for place, each in enumerate(self.rewards) if not _is_finite(each)]
        return (
            f"{self.estimator} cannot compare rewards {self.rewards}: the rewards of samples "
            f"{places} are not finite as float32. Refuse the group in its reward function, as "
            "parse_reward does"
        )


class AdvantagesNotFinite(OffbeatError):
    """Finite rewards are so far apart that an advantage is infinite as float32.

    Fix: divide the rewards by a constant.
    """

    estimator: str
    rewards: Rewards
    advantages: Advantages

    def __str__(self) -> str:
        return (
            f"{self.estimator} makes advantages {self.advantages} of the rewards {self.rewards}, but "
            f"float32 ends at {_LARGEST:.2g}. Divide the rewards by a constant where they are made, or "
            "set algorithm.advantage to grpo, which divides by their deviation"
        )


def _is_finite(reward: float) -> bool:
    return abs(reward) <= _LARGEST  # False for NaN, too


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """Named formula over the rewards of a group."""

    name: str
    formula: Callable[[Rewards], Advantages]

    def __call__(self, rewards: Rewards, valid: Sequence[bool]) -> Advantages:
        """Return one advantage per sample, in the order of ``rewards``.

        Args:
            rewards: Rewards of all samples. The reward of a masked sample is not read.
            valid: False for a masked sample.

        Raises:
            RewardsNotFinite: The reward of a valid sample is NaN, or infinite as float32.
            AdvantagesNotFinite: An advantage is infinite as float32.
        """
        compared = tuple(reward for reward, counts in zip(rewards, valid, strict=True) if counts)
        if not all(map(_is_finite, compared)):
            raise RewardsNotFinite(self.name, compared)
        if not compared or min(compared) == max(compared):
            return (0.0,) * len(rewards)
        advantages = self.formula(compared)
        if not all(map(_is_finite, advantages)):
            raise AdvantagesNotFinite(self.name, compared, advantages)
        if len(compared) == len(rewards):
            return advantages
        following = iter(advantages)
        return tuple(next(following) if counts else 0.0 for counts in valid)


def grpo(rewards: Rewards) -> Advantages:
    """Compute ``(r - mean) / (std + 1e-6)`` with the sample standard deviation (divisor ``G - 1``).

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. The paper does not specify the divisor. TRL and
    verl use ``G - 1``, and 1e-6 is verl's. The division gives a nearly solved prompt the same
    weight as a half-solved prompt.
    """
    centred = grpo_no_std(rewards)
    std = math.hypot(*centred) / math.sqrt(len(rewards) - 1)
    return tuple(each / (std + GRPO_EPS) for each in centred)


def grpo_no_std(rewards: Rewards) -> Advantages:
    """Compute ``r - mean``: GRPO without the division by the standard deviation."""
    mean = math.fsum(rewards) / len(rewards)
    return tuple(each - mean for each in rewards)


def dr_grpo(rewards: Rewards) -> Advantages:
    """Compute ``r - mean``: the advantage of Dr. GRPO, arXiv:2503.20783, section 3.2.

    Dr. GRPO removes two biases of GRPO. The division by the standard deviation is removed here,
    which makes this formula equal to ``grpo_no_std``. The division by lengths belongs to the loss.
    There, ``normalize="constant"`` divides by the generation budget, as the paper does.
    ``"tokens"`` divides by the number of tokens in the step. This number is the same for every
    response in the step, but it is smaller in a step with short responses, so the paper lists that
    form as biased. ``"sequences"`` has all of the length bias again.
    """
    return grpo_no_std(rewards)


def rloo(rewards: Rewards) -> Advantages:
    """Compute ``r_i`` minus the mean of the other samples: ``G / (G - 1) * (r_i - mean)``.

    Leave-one-out REINFORCE, Kool et al. 2019 and arXiv:2402.14740. It is unbiased, because the
    baseline of a sample does not depend on that sample.
    """
    scale = len(rewards) / (len(rewards) - 1)
    return tuple(scale * each for each in grpo_no_std(rewards))


def grpo_loo(rewards: Rewards) -> Advantages:
    """Compute ``(r_i - mean) / (std + 1e-6)`` with mean and deviation of the other samples.

    This is the estimator of NeMo-RL's ``grpo.use_leave_one_out_baseline`` and
    ``normalize_rewards``. If the rewards of the others are all equal, their deviation is 0, and
    there is no division. So if a single sample differs, it gets the plain difference, while each
    other sample's difference is divided by the deviation of its peers. Deviations differ between
    samples, so a group's advantages do not sum to 0.
    """
    return tuple(
        _beside(reward, rewards[:place] + rewards[place + 1 :])
        for place, reward in enumerate(rewards)
    )


def _beside(reward: float, others: Rewards) -> float:
    mean = math.fsum(others) / len(others)
    if min(others) == max(others):
        return reward - mean
    std = math.hypot(*(each - mean for each in others)) / math.sqrt(len(others) - 1)
    return (reward - mean) / (std + GRPO_EPS)


def pass_at_k(rewards: Rewards, k: int) -> Advantages:
    """Compute, per sample, k times its marginal contribution to the best of k attempts.

    ``k * (mean of max(r[I]) over the I with i  -  mean of max(r[J]) over the J without i)``, where
    I and J are the subsets of k samples. Averaged over samples, this value times the gradient of a
    sample's logprob is an unbiased estimate of the gradient of ``E[max of k]``, because the second
    term does not depend on the sample. For rewards of 0 and 1 this is pass@k. ``k = 1`` is
    ``rloo``.

    The first term is the reward transform of PKPO, arXiv:2505.15201, times G. The second term is
    not one of the paper's baselines. It is ``(G - 1) / G`` times the leave-one-out baseline
    (equation 29). With this factor, a group's advantages sum to 0. The paper prefers a different
    baseline (equation 33): the best of the k - 1 other samples of each subset. With that baseline,
    no advantage is negative.

    Subsets without a given sample exist only for k < G, so a larger k counts as G - 1. The cost is
    O(G log G).
    """
    size = len(rewards)
    k = min(k, size - 1)
    order = sorted(range(size), key=rewards.__getitem__)
    ranked = [rewards[i] for i in order]
    subsets = math.comb(size - 1, k - 1)
    others = math.comb(size - 1, k)
    # The max of a subset is its member of highest rank j. C(j, k-1) subsets have that member, and
    # C(j-1, k-2) of these also have a given sample of lower rank.
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
    """Return the estimator that a recipe names.

    Args:
        name: One of ``ESTIMATORS``, or ``pass_at_k``.
        pass_k: The k of ``pass_at_k``. The other estimators do not use it.
    """
    if name == pass_at_k.__name__:
        return AdvantageEstimator(name, partial(pass_at_k, k=pass_k))
    return ESTIMATORS[name]


ESTIMATORS: Final[Mapping[str, AdvantageEstimator]] = MappingProxyType(
    {
        formula.__name__: AdvantageEstimator(formula.__name__, formula)
        for formula in (grpo, grpo_no_std, dr_grpo, rloo, grpo_loo)
    }
)
"""Estimators without parameters, by the name that a recipe uses."""
