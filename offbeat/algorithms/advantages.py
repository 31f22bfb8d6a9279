"""How a sample's reward compares with its group's. Plain Python: the controller runs it.

Every estimator maps the rewards of one prompt group to one advantage a sample, in the same order.
Rewards must be finite; producers vouch for that. Two rules hold for all of them: a group whose
rewards are all equal gets exact zeros, and so does a group of a single sample, which has nothing to
be compared with. Legend: G samples of the group, ``r`` their rewards, ``mean`` over the group.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


ESTIMATORS: Final[Mapping[str, AdvantageEstimator]] = MappingProxyType(
    {
        formula.__name__: AdvantageEstimator(formula.__name__, formula)
        for formula in (grpo, grpo_no_std, dr_grpo, rloo)
    }
)
"""Estimators by the name a recipe uses."""
