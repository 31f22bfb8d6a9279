"""Rewards a mathematical answer, compared by the library math-verify.

It runs in a reward child, and the child's deadline is the only deadline. math-verify's own timeouts
are disabled: they return False, so an answer that it had no time to read would get a reward of 0.
Instead, the child is killed, and the failure is counted as ``reward_deadline``.

Only a reward child imports this module, because the package is an extra, and its import takes a
second.
"""
# pyright: reportArgumentType=false, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# math-verify is an extra and may not be installed. It declares its timeouts as integers,
# and accepts None for no timeout.

import logging
from collections.abc import Mapping
from typing import Any, Final

from math_verify import parse, verify

from offbeat.environments.final_answer import without_thinking
from offbeat.environments.prompt_row import read_column

_MARKED: Final = ("\\boxed", "$", "\\(", "\\[")
"""Marks by which math-verify finds LaTeX. In a text without marks, it finds only numbers."""


def math_reward(
    prompt: Mapping[str, Any], response: str, *, answer_key: str = "answer", correct: float = 1.0
) -> float:
    r"""Return ``correct`` if the response's final answer equals the row's, else 0.

    The final answer is the last ``\boxed{}``, LaTeX or number outside thinking blocks. A response
    without a final answer is wrong.

    Raises:
        ValueError: math-verify cannot read the row's answer.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    answer = read_column(prompt, answer_key)
    wanted = parse(_mark_bare(str(answer)), parsing_timeout=None)
    if not wanted:
        raise ValueError(
            f"math-verify reads no answer in {answer_key}={answer!r:.80}; write only the value, "
            "as a number or LaTeX"
        )
    given = parse(without_thinking(response), parsing_timeout=None)
    return correct if verify(wanted, given, timeout_seconds=None) else 0.0


def _mark_bare(answer: str) -> str:
    """Mark a bare value as LaTeX. Otherwise math-verify would read only its last number."""
    return answer if any(mark in answer for mark in _MARKED) else f"\\boxed{{{answer}}}"
