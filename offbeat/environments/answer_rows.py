"""Check of rows that a grader compares responses with."""

from collections.abc import Mapping


def answer_problem(row: Mapping[str, object], answer_key: str) -> str | None:
    """Return why a row has no answer to compare with; None when it has one."""
    if answer_key not in row:
        return f"has no {answer_key!r} (keys: {', '.join(row)}); the grader compares with it"
    answer = row[answer_key]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"{answer_key!r} is {answer!r:.80}; it is a string or a number"
    return None if str(answer).strip() else f"{answer_key!r} is empty; it needs a value"
