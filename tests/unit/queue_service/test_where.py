"""The predicate of a claim: which clauses there are, and which groups satisfy them."""

from typing import Any

import pytest

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core.where import matches, normal


@pytest.mark.parametrize(
    ("clause", "complaint"),
    [
        ("reward", r"clauses \(tag, operator, value\)"),
        ("abc", r"clauses \(tag, operator, value\)"),  # three characters are no clause
        (("reward", ">"), r"clauses \(tag, operator, value\)"),
        (("reward", "~", 1), "operator '~'"),
        (("reward", ">", [1]), r"value \[1\]"),
        (("reward", ">", object()), "int, float, str, bool or None"),
        (("task", "in", "math"), "in 'math'.*a list of values"),
        (("task", "in", 3), "in 3.*a list of values"),
        (("task", "in", [b"math"]), "int, float, str, bool or None"),
    ],
)
def test_a_clause_that_cannot_be_compared_is_refused(clause: Any, complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        normal([clause])


def test_lists_and_tuples_come_to_the_same_predicate() -> None:
    lists = normal([["task", "in", ["math", "code"]], ["reward", ">", 0]])
    assert lists == normal((("task", "in", ("math", "code")), ("reward", ">", 0)))
    assert hash(lists)


@pytest.mark.parametrize(
    ("operator", "value", "fits"),
    [
        ("==", 2, {2}),
        ("!=", 2, {1, 3}),
        ("<", 2, {1}),
        ("<=", 2, {1, 2}),
        (">", 2, {3}),
        (">=", 2, {2, 3}),
        ("in", (1, 3), {1, 3}),
        ("in", (), set[int]()),
    ],
)
def test_an_operator_compares_the_tag_with_the_value(
    operator: str, value: Any, fits: set[int]
) -> None:
    where = normal([("score", operator, value)])
    assert {score for score in (1, 2, 3) if matches(where, {"score": (score,)})} == fits


def test_all_rows_have_to_satisfy_all_clauses() -> None:
    where = normal([("score", ">", 1), ("task", "==", "math")])
    assert matches(where, {"score": (2, 3), "task": ("math", "math")})
    assert not matches(where, {"score": (2, 1), "task": ("math", "math")})
    assert not matches(where, {"score": (2, 3), "task": ("math", "code")})
    assert not matches(where, {"score": (2, 3)}), "a tag that is not there fits nothing"
    assert matches((), {}), "no clause, no condition"


def test_a_text_and_a_number_have_no_order() -> None:
    assert not matches(normal([("score", ">", 1)]), {"score": ("high",)})
    assert not matches(normal([("score", "<", 1)]), {"score": (None,)})
