"""Defines which values count as a reward."""

import math
import numbers
from typing import NamedTuple, TypeGuard

_LARGEST = 3.4e38  # rewards travel as float32


class BadReward(NamedTuple):
    """Explains why a value is no reward: a counter's name, and one line for a person."""

    reason: str
    detail: str


def reward_of(value: object) -> float | BadReward:
    """Return ``value`` as a reward: a real number, finite as float32.

    Anything else is reported, not corrected.
    """
    if value is None:
        return BadReward("reward_none", "the reward is None; return a float on every path")
    if not isinstance(value, float) and not _is_other_real(value):
        got = f"{type(value).__name__} {value!r:.80}"
        return BadReward("reward_wrong_type", f"the reward is {got}; return a float")
    try:
        reward = float(value)
    except OverflowError:  # an integer beyond any float
        reward = math.inf
    if not abs(reward) <= _LARGEST:  # False for NaN, too
        return BadReward("reward_not_finite", f"the reward is {reward}; return a finite float")
    return reward


def _is_other_real(value: object) -> TypeGuard[numbers.Real]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
