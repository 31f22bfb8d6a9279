"""The digest of a function follows what it does, and names what it cannot see."""

import functools
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.value_digest import digest_value

HELPER = "def helper(x): return x + 1\n"
REWARD = HELPER + "def reward(row, response): return helper(len(response))\n"


def defined(source: str, name: str = "reward") -> Any:
    namespace: dict[str, Any] = {"__name__": "__main__", "re": re}
    exec(compile(source, "cell", "exec"), namespace)  # noqa: S102 -- as a notebook does
    return namespace[name]


def digest(source: str) -> str:
    return digest_value(defined(source)).digest


def test_the_same_code_in_another_cell_has_the_same_digest() -> None:
    assert digest(REWARD) == digest("\n\n# a comment\n" + REWARD)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (REWARD, REWARD.replace("x + 1", "x + 2")),
        (REWARD, REWARD.replace("x + 1", "x - 1")),
        ("def reward(row, r, w=1): return w", "def reward(row, r, w=2): return w"),
        ("def reward(row, r, *, w=1): return w", "def reward(row, r, *, w=2): return w"),
        ("K = 1\ndef reward(row, r): return K", "K = 2\ndef reward(row, r): return K"),
        ("K = [1, {2}]\ndef reward(a, b): return K", "K = [1, {3}]\ndef reward(a, b): return K"),
        (
            "P = re.compile('a')\ndef reward(a, b): return P.match(b)",
            "P = re.compile('b')\ndef reward(a, b): return P.match(b)",
        ),
        (
            "class reward:\n  def score(self): return 1",
            "class reward:\n  def score(self): return 2",
        ),
        (
            "def reward(a, b):\n  def inner(): return 1\n  return inner()",
            "def reward(a, b):\n  def inner(): return 2\n  return inner()",
        ),
        ("reward = lambda a, b: 1.0", "reward = lambda a, b: 1"),
    ],
)
def test_a_change_in_what_it_does_is_another_digest(before: str, after: str) -> None:
    assert digest(before) != digest(after)


def test_a_global_that_it_does_not_name_does_not_count() -> None:
    source = "def reward(row, r): return r.K"
    assert digest(source) == digest("K = 7\n" + source)


def test_the_closure_counts() -> None:
    def scaled(weight: float) -> Callable[[Any, str], float]:
        return lambda row, response: weight * len(response)

    assert digest_value(scaled(1.0)).digest == digest_value(scaled(1.0)).digest
    assert digest_value(scaled(1.0)).digest != digest_value(scaled(2.0)).digest


def test_sets_are_digested_without_an_order() -> None:
    words = [f"word {number}" for number in range(50)]
    source = "def reward(a, b): return K"
    one, other = defined(source), defined(source)
    one.__globals__["K"], other.__globals__["K"] = set(words), {*words[25:], *words[:25]}
    assert digest_value(one).digest == digest_value(other).digest


def test_functions_that_call_each_other_have_a_digest() -> None:
    source = "def even(n): return n == 0 or reward(n - 1)\ndef reward(n): return n and even(n - 1)"
    assert digest(source) == digest(source)
    assert digest(source) != digest(source.replace("n == 0", "n == 1"))


def test_the_attributes_of_an_object_count() -> None:
    @dataclass
    class Grader:
        strictness: int

        def __call__(self, row: Any, response: str) -> float:
            return self.strictness / len(response)

    assert digest_value(Grader(1)).digest == digest_value(Grader(1)).digest
    assert digest_value(Grader(1)).digest != digest_value(Grader(2)).digest
    assert digest_value(Grader(1).__call__).digest != digest_value(Grader(2).__call__).digest
    assert digest_value(functools.partial(Grader, 1)).digest != digest_value(Grader).digest


def test_a_module_that_the_function_imports_itself_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    source = "def reward(a, b):\n  import own_grader, json\n  return own_grader.grade(b)"
    (tmp_path / "own_grader.py").write_text("def grade(b): return 1")
    before = digest(source)
    assert digest(source) == before
    (tmp_path / "own_grader.py").write_text("def grade(b): return 2")
    assert digest(source) != before


def test_what_cannot_be_digested_is_named() -> None:
    reward = defined("def reward(row, r):\n  with LOCK: return 1.0")
    reward.__globals__["LOCK"] = threading.Lock()
    assert digest_value(reward).unverifiable == ("LOCK (_thread:lock)",)
    assert digest_value(defined(REWARD)).unverifiable == ()
