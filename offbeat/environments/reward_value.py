"""Validation of reward values."""

import enum
import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeGuard, cast

from offbeat.messages.failures import ENVIRONMENT_UNAVAILABLE
from offbeat.messages.redaction import cut_head

_LARGEST = 3.4e38  # rewards are stored as float32
_REWARD: Final = "reward"
_ANSWER: Final = "answer"
_LONGEST_ANSWER_BYTES: Final = 200
"""Maximum length of an answer. It is part of receipts, which the controller handles."""


class RewardFault(enum.StrEnum):
    """Cause of a missing reward."""

    SAMPLE = "sample"  # the row, the response, or user code that fails on them
    SERVICE = "service"  # a service that user code needs is down: a later retry may work
    SHARED = "shared"  # another episode ended the process, or the cause is unknown
    NONE = "none"  # the function returned None: it does not apply to the sample
    IMPORT = "import"  # user code cannot be imported: no sample will get a reward


class BadReward(NamedTuple):
    """Reason why a value is not a reward: a counter's name, and a line for the user."""

    reason: str
    detail: str
    fault: RewardFault = RewardFault.SAMPLE
    traceback: str = ""  # of the error in user code


def unavailable(detail: str) -> BadReward:
    """Return the missing reward after an outage of the service. The sample is not at fault."""
    return BadReward(ENVIRONMENT_UNAVAILABLE, detail, RewardFault.SERVICE)


class NamedRewards(NamedTuple):
    """Reward of a sample, the values that may explain it, and its final answer."""

    reward: float
    by_name: Mapping[str, float | None]  # None: the function does not apply to the sample
    answer: str | None = None  # empty: the sample has none; None: not searched


def parse_reward(value: object, name: str = "the reward") -> float | BadReward:
    """Return ``value`` as a reward: a real number, finite as float32.

    A bool counts as a number. So does an array or tensor without axes. Any other value is not
    corrected but reported under ``name``.
    """
    if value is None:
        problem = f"{name} is None; return a float on every path"
        return BadReward("reward_none", problem, RewardFault.NONE)
    if not isinstance(value, float):
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = cast("Any", value).item()  # numpy, torch, jax
        if not isinstance(value, numbers.Real):
            got = f"{type(value).__name__} {cut_head(repr(value), 80)}"
            return BadReward("reward_wrong_type", f"{name} is {got}; return a float")
    try:
        reward = float(value)
    except OverflowError:  # an integer beyond any float
        reward = math.inf
    if not abs(reward) <= _LARGEST:  # False for NaN, too
        problem = f"{name} is {reward}; return a number that is finite as float32"
        return BadReward("reward_not_finite", problem)
    return reward


def are_rewards(values: Sequence[object]) -> TypeGuard[list[float]]:
    """Return whether this is a list of rewards that ``parse_reward`` would return unchanged."""
    kind: type[object] = type(values)
    if kind is not list or set(map(type, values)) != {float}:
        return False
    sizes = map(abs, cast("Sequence[float]", values))
    return all(map(_LARGEST.__ge__, sizes))  # False for NaN


def parse_named_reward(value: Mapping[object, object]) -> NamedRewards | BadReward:
    """Return the content of the mapping that a reward function returned.

    Its keys are ``reward`` and ``answer``, a text. An ``answer`` of None means that the sample has
    none. Other keys are refused.
    """
    answer = value.get(_ANSWER, "")
    keys: set[object] = {_REWARD, _ANSWER}
    if set(value) != keys or not isinstance(answer, str | None):
        got = {str(key): type(each).__name__ for key, each in value.items()}
        shown = cut_head(repr(got), 200)
        problem = f"the reward is a mapping of {shown}; return a float, or a mapping of "
        return BadReward("reward_wrong_type", f"{problem}'reward' (float) and 'answer' (str)")
    reward = parse_reward(value[_REWARD])
    return (
        reward
        if isinstance(reward, BadReward)
        else NamedRewards(reward, {}, short_answer(answer or ""))
    )


def short_answer(answer: str) -> str:
    """Return a final answer in the form in which it is compared: a long answer as its digest."""
    content = answer.encode(errors="replace")
    if len(content) <= _LONGEST_ANSWER_BYTES:
        return content.decode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
