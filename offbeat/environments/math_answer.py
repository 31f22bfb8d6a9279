"""Reward of a mathematical answer, compared by the library math-verify.

It runs in a reward child, whose deadline is the only one: math-verify's own are signals after which
it answers False, so that an answer it had no time to read would be a reward of 0. Without them the
child is killed, and the failure has a name: ``reward_deadline``.

Only a reward child imports this module: the package is an extra, and takes a second to import.
"""
# pyright: reportArgumentType=false, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# math-verify is an extra, unknown where it is not installed; it declares its timeouts as integers,
# and takes None for no timeout.

import logging
from collections.abc import Mapping
from typing import Any, Final

from math_verify import parse, verify

from offbeat.environments.final_answer import without_thinking
from offbeat.environments.prompt_row import column_of

_MARKED: Final = ("\\boxed", "$", "\\(", "\\[")
"""Marks by which math-verify finds LaTeX; it searches a text without any for numbers only."""


def math_reward(
    prompt: Mapping[str, Any], response: str, *, answer_key: str = "answer", correct: float = 1.0
) -> float:
    r"""Return ``correct`` if the response's final answer equals the row's, else 0.

    The final answer is the last ``\boxed{}``, LaTeX or number outside of thinking blocks. A
    response without one is wrong.

    Raises:
        ValueError: The row's answer has nothing that math-verify can read.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    answer = column_of(prompt, answer_key)
    wanted = parse(_marked(str(answer)), parsing_timeout=None)
    if not wanted:
        raise ValueError(
            f"math-verify reads no answer in {answer_key}={answer!r:.80}; write the "
            "value alone, as a number or LaTeX"
        )
    given = parse(without_thinking(response), parsing_timeout=None)
    return correct if verify(wanted, given, timeout_seconds=None) else 0.0


def _marked(answer: str) -> str:
    """Mark a bare value as LaTeX, of which math-verify would otherwise read the last number."""
    return answer if any(mark in answer for mark in _MARKED) else f"\\boxed{{{answer}}}"
