"""Reward functions that the package brings, by the name a recipe gives in place of module:name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Grader:
    """A reward function of the package."""

    target: str  # module:name
    package: str = ""  # that it imports; empty: none beyond those of offbeat
    extra: str = ""  # of offbeat, with which the package is installed
    answer_key: str = ""
    """Key of a prompt's row with the answer to compare with, unless the option of this name sets
    another; empty: rows need none."""


GRADERS: Final[Mapping[str, Grader]] = MappingProxyType(
    {
        "math_verify": Grader(
            "offbeat.environments.math_answer:math_reward",
            package="math_verify",
            extra="math",
            answer_key="answer",
        ),
    }
)


def reward_target(target: str) -> str:
    """Return ``module:name`` of a reward: that of a grader of the package, or ``target`` itself."""
    grader = GRADERS.get(target)
    return target if grader is None else grader.target
