"""Loads a user's advantage estimator: a function from a group's rewards to one number per sample.

The rules in ``advantages`` hold for it as well. The function gets the rewards of the valid samples.
A masked sample gets the advantage 0, and so does every sample of a group with equal rewards. Plain
Python: the controller runs it. The legend is the same as in ``advantages``.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from offbeat.algorithms.advantages import AdvantageEstimator, Advantages, Rewards, estimator
from offbeat.config.sections.algorithm import AlgorithmConfig
from offbeat.config.user_code import ADVANTAGE, TargetNotFound, describe, load_target
from offbeat.messages.failures import UserCodeRefused

_EXAMPLES: Final = (
    (0.0, 1.0),
    (0.0, 1.0, 1.0, 0.0, 1.0),
    (0.5, -1.25, 3.0, 0.0),
    (2.0, 100.0, 7.0),
)
_RELATIVE: Final = 1e-6
_FORM: Final = "Return one finite number for each reward, in the same order"


class AdvantageRefused(UserCodeRefused):
    """The function of ``algorithm.advantage`` cannot be used, or returns a wrong result.

    Fix: return one finite number per sample (docs/algorithms.md).
    """

    form = "algorithm.advantage={}: {}. {}"


class CustomFormula:
    """The user's function, with a check of every result."""

    def __init__(self, function: Callable[..., Any], target: str, working_dir: Path) -> None:
        """Store the function. ``target`` names it in messages; ``working_dir`` locates errors."""
        self._function, self.target, self._working_dir = function, target, working_dir

    def __call__(self, rewards: Rewards) -> Advantages:
        """Return one advantage per reward.

        Raises:
            AdvantageRefused: The function raised, or returned something else.
        """
        try:
            returned = self._function(rewards)
        except Exception as error:
            problem = f"it raised {describe(error, self._working_dir)} for the rewards {rewards}"
            raise AdvantageRefused(self.target, problem, "Repair the function") from error
        try:
            advantages = tuple(float(each) for each in returned)
        except (TypeError, ValueError) as error:
            problem = f"it returned {returned!r} for the rewards {rewards}"
            raise AdvantageRefused(self.target, problem, _FORM) from error
        if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
            problem = f"it returned {advantages} for the rewards {rewards}"
            raise AdvantageRefused(self.target, problem, _FORM)
        return advantages


def load_estimator(config: AlgorithmConfig, working_dir: Path) -> AdvantageEstimator:
    """Return the recipe's estimator. A user's estimator is imported and tried on a few groups.

    Raises:
        AdvantageRefused: The function cannot be imported, does not return a finite number per
            sample, or its results change in a second call or with the order of the samples.
    """
    target = config.advantage_target
    if target is None:
        return estimator(config.advantage, pass_k=config.pass_k)
    try:
        function = load_target(target, working_dir, ADVANTAGE)
    except TargetNotFound as error:
        raise AdvantageRefused(target, error.problem, error.fix) from error
    formula = CustomFormula(function, target, working_dir)
    prove_formula(formula)
    return AdvantageEstimator(target, formula)


def prove_formula(formula: CustomFormula) -> None:
    """Try the user's function on the rewards of some groups.

    Raises:
        AdvantageRefused: The function does not return a finite number per sample, or its results
            change in a second call or with the order of the samples.
    """
    for rewards in _EXAMPLES:
        _check_repeats(formula, rewards)


def _check_repeats(formula: CustomFormula, rewards: Rewards) -> None:
    want = formula(rewards)
    if not _are_close(again := formula(rewards), want):
        problem = f"it returned {want} and then {again} for the rewards {rewards}"
        fix = "Use no random numbers, and no state that a call changes"
        raise AdvantageRefused(formula.target, problem, fix)
    turned = formula(rewards[::-1])[::-1]
    if len(set(rewards)) == len(rewards) and not _are_close(turned, want):
        problem = (
            f"it returned {want} for the rewards {rewards}, but {turned} for these samples in the "
            "opposite order"
        )
        fix = (
            "Compute a sample's advantage from the rewards, not from its place: places mean nothing"
        )
        raise AdvantageRefused(formula.target, problem, fix)


def _are_close(first: Advantages, second: Advantages) -> bool:
    scale = max(map(abs, (*first, *second)))
    return all(abs(a - b) <= _RELATIVE * scale for a, b in zip(first, second, strict=True))
