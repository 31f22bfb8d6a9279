"""Reward functions of the package, by the name that a recipe uses instead of module:name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Grader:
    """A reward function of the package."""

    target: str  # module:name
    package: str = ""  # third-party package that it imports; empty: only offbeat's dependencies
    extra: str = ""  # extra of offbeat that installs the package
    answer_key: str = ""
    """Key of a prompt's row with the answer to compare with, unless the option of this name sets a
    different key. Empty if rows need no answer.
    """


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
    """Return the ``module:name`` of a reward; ``target`` may name a grader of the package."""
    grader = GRADERS.get(target)
    return target if grader is None else grader.target
