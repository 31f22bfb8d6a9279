"""Predicates on tags, as data: a tuple of ``(tag, operator, value)`` that crosses any wire.

A row matches if all clauses hold; a group, if all its rows do. A group without the tag does not
match, nor does a comparison of text with a number.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core.records import GivenTags, Tags, Where

_SCALARS: Final = frozenset({int, float, str, bool, type(None)})


def _among(value: object, among: Iterable[object]) -> bool:
    return value in among


_Compare = Callable[[Any, Any], bool]
OPERATORS: Final[Mapping[str, _Compare]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": cast("_Compare", operator.lt),
    "<=": cast("_Compare", operator.le),
    ">": cast("_Compare", operator.gt),
    ">=": cast("_Compare", operator.ge),
    "in": _among,
}


def normal(where: Iterable[Sequence[Any]]) -> Where:
    """Return the predicate in its one hashable form.

    Raises:
        SchemaError: A clause is not ``(tag, operator, value)`` with a known operator and plain
            value.
    """
    return tuple(_clause(clause) for clause in where)


def _clause(clause: Sequence[Any]) -> tuple[str, str, Any]:
    if isinstance(clause, str) or len(clause) != 3:  # noqa: PLR2004 - tag, operator, value
        raise SchemaError("where", f"{clause!r}", "clauses (tag, operator, value)")
    tag, name, value = clause
    if name not in OPERATORS:
        raise SchemaError("where", f"operator {name!r}", f"one of {', '.join(OPERATORS)}")
    if name != "in":
        _check_plain((value,))
        return str(tag), name, value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SchemaError("where", f"in {value!r}", "in a list of values")
    among = tuple(cast("Iterable[Any]", value))
    _check_plain(among)
    return str(tag), name, among


def _check_plain(values: tuple[Any, ...]) -> None:
    for value in values:
        if type(value) not in _SCALARS:
            raise SchemaError("where", f"value {value!r}", "int, float, str, bool or None")


def matches(where: Where, tags: GivenTags) -> bool:
    """Return whether all rows of the group satisfy all clauses."""
    for tag, name, value in where:
        values = tags.get(tag)
        if values is None:
            return False
        compare = OPERATORS[name]
        try:
            if not all(compare(each, value) for each in values):
                return False
        except TypeError:  # text and numbers have no order
            return False
    return True


def checked_tags(tags: GivenTags, rows: int) -> Tags:
    """Return an immutable copy of the tags.

    Raises:
        SchemaError: A tag does not have one value per row, or has one that is not a plain scalar.
    """
    copy = {name: tuple(values) for name, values in tags.items()}
    for name, values in copy.items():
        if len(values) != rows:
            raise SchemaError(f"tag {name}", f"{len(values)} values", f"{rows}: one per row")
        if not _SCALARS.issuperset(map(type, values)):
            odd = next(value for value in values if type(value) not in _SCALARS)
            raise SchemaError(f"tag {name}", f"{odd!r}", "int, float, str, bool or None")
    return copy
