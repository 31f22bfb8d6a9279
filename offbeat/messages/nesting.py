"""Nesting of JSON values that other people, or a model, have written."""

from typing import Final, cast

DEEPEST: Final = 100
"""Maximum nesting of lists and objects: far below the limit of recursive readers and writers."""


def nesting_depth(value: object) -> int:
    """Return the nesting depth of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [
            child
            for each in cast("list[dict[str, object] | list[object]]", level)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return depth
