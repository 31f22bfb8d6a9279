"""Columns of rows by the names that recipes give them, and the answers that graders compare with."""

from collections.abc import Mapping
from typing import Any, cast


def column_of(row: Mapping[str, object], name: str) -> object:
    """Return a column of a row; a dotted name that is no column reaches into nested objects.

    Raises:
        KeyError: There is no such column.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = cast("Any", value[part])
    return value


def answer_problem(row: Mapping[str, object], answer_key: str) -> str | None:
    """Return why a row has no answer to compare with; None when it has one."""
    try:
        answer = column_of(row, answer_key)
    except KeyError:
        return f"has no {answer_key!r} (keys: {', '.join(row)}); the grader compares with it"
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"{answer_key!r} is {answer!r:.80}; it is a string or a number"
    return None if str(answer).strip() else f"{answer_key!r} is empty; it needs a value"
