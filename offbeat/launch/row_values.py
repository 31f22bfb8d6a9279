"""Keeps the values of rows that a program gives, and refuses what JSON would change."""

import dataclasses
import math
import os
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, cast
from uuid import UUID

from offbeat.config.problems import shorten
from offbeat.messages.nesting import DEEPEST
from offbeat.messages.text import cut, printable

_ARRAY_LIBRARIES: Final = ("numpy", "torch")
_KEPT_KINDS: Final = ("b", "i", "u", "f", "U", "T", "O")
"""Kinds of a dtype of numpy that ``tolist`` keeps. It can make a number of a date."""
_FLOAT_BYTES: Final = 8

_LONGEST_PLACE: Final = 60
_OF_MISSING: Final = "Drop the row, or give None, in a DataFrame with frame.convert_dtypes().astype(object).where(frame.notna(), None)"
_MISSING: Final = ("NAType", "NaTType")
"""Classes of pandas for a missing value."""
_OTHER: Final = "Give numbers, text, lists and dicts. Pictures are read from files that a row names"
_UNKNOWN: Final = "has the type {}, which JSON cannot hold"
_CHANGED: Final = "has the type {}, and would come back as "
_REASONS: Final[tuple[tuple[type | tuple[type, ...], str, str], ...]] = (
    (Enum, "is an Enum ({}), and only its value would come back", "Give VALUE.value"),
    (tuple, "is a tuple, and would come back as a list", "Give list(VALUE), or VALUE._asdict()"),
    ((set, frozenset), _UNKNOWN, "Give sorted(VALUE)"),
    ((bytes, bytearray, memoryview), _UNKNOWN, "Give VALUE.decode(), or base64 text"),
    (Decimal, _UNKNOWN, "Give str(VALUE), which keeps every digit, or float(VALUE)"),
    ((date, time), _UNKNOWN, "Give VALUE.isoformat()"),
    (timedelta, _UNKNOWN, "Give VALUE.total_seconds()"),
    ((os.PathLike, UUID), _UNKNOWN, "Give str(VALUE)"),
    (str, f"{_CHANGED}str", "Give str(VALUE)"),
    (int, f"{_CHANGED}int", "Give int(VALUE)"),
    (float, f"{_CHANGED}float", "Give float(VALUE)"),
    (list, f"{_CHANGED}list", "Give list(VALUE)"),
)
"""Types, the problem with such a value, and the fix. The first row that fits counts."""


class UnkeptValue(Exception):
    """Error of a key or a value that a prompt file cannot keep, and the fix."""

    def __init__(self, what: str, problem: str, fix: str) -> None:
        super().__init__(f"{printable(what)} {problem}")
        self.fix = fix


def keep_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row as JSON can hold it, with equal values at every depth.

    Arrays of numpy and torch are lists, their numbers are Python numbers, and every mapping is a dict.

    Raises:
        UnkeptValue: JSON would change a key or a value, or cannot hold it.
    """
    return _keep_mapping("", row, 0)


def _keep_mapping(place: str, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    kept = dict[str, Any]()
    for key, inner in value.items():
        if not isinstance(key, str) or isinstance(key, Enum):
            name = repr(str(key.value if isinstance(key, Enum) else key))
            what = f"the key {shorten(key)}{f' of {place}' if place else ''}"
            problem = f"has the type {_type_name(key)}, and keys of JSON are text"
            raise UnkeptValue(what, problem, f"Write it as text, such as {name}")
        below = f"{place}.{key}" if place else key
        kept[_check_text(below, str(key))] = _keep(below, inner, depth + 1)
    return kept


def _keep(place: str, value: Any, depth: int) -> Any:  # noqa: ANN401 -- any value of a row
    kind = cast("type[object]", type(value))
    if value is None or kind is bool or kind is int:
        return value
    if kind is str:
        return _check_text(place, value)
    if kind is float:
        return _check_number(place, value)
    if _is_array(value):
        return _keep(place, value.tolist(), depth)
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and kind is not list:
        raise UnkeptValue(f"{place} = {shorten(value)}", *_why_not(value))
    if depth >= DEEPEST:
        problem = f"is nested more than {DEEPEST} deep"
        raise UnkeptValue(
            cut(place, _LONGEST_PLACE), problem, "Make it flatter, or put it in a string"
        )
    if is_mapping:
        return _keep_mapping(place, cast("Mapping[Any, Any]", value), depth)
    return [_keep(f"{place}[{at}]", inner, depth + 1) for at, inner in enumerate(value)]


def _check_text(place: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = "holds half of a character, which UTF-8 cannot write"
        raise UnkeptValue(f"{place} = {shorten(value)}", problem, "Remove or replace it") from error
    return value


def _check_number(place: str, value: float) -> float:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        problem, fix = "is a missing value, which JSON cannot hold", _OF_MISSING
    else:
        problem, fix = "is not finite, and JSON has no such number", "Give a finite number, or None"
    raise UnkeptValue(f"{place} = {value}", problem, fix)


def _is_array(value: Any) -> bool:  # noqa: ANN401 -- as above
    """Return whether ``tolist`` makes lists and numbers of a value and loses nothing."""
    if type(value).__module__.partition(".")[0] not in _ARRAY_LIBRARIES:
        return False
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "tolist") or hasattr(value, "mask"):
        return False
    kind = getattr(dtype, "kind", "O")  # torch has none
    return kind in _KEPT_KINDS and (kind != "f" or dtype.itemsize <= _FLOAT_BYTES)


def _why_not(value: Any) -> tuple[str, str]:  # noqa: ANN401 -- as above
    """Return why a prompt file cannot keep a value, and the fix."""
    kind = _type_name(value)
    if kind in _MISSING:
        return "is a missing value, which JSON cannot hold", _OF_MISSING
    if dataclasses.is_dataclass(value):
        return f"is a dataclass ({kind})", "Give dataclasses.asdict(VALUE)"
    for types, problem, fix in _REASONS:
        if isinstance(value, types):
            return problem.format(kind), fix
    if type(value).__module__ == "numpy":
        return f"has the type {value.dtype}, which JSON cannot hold", "Give str(VALUE)"
    if hasattr(value, "tolist"):
        return f"has the type {kind}", "Give VALUE.tolist()"
    is_iterable = hasattr(value, "__iter__") and not callable(value)
    return f"has the type {kind}", "Give list(VALUE)" if is_iterable else _OTHER


def _type_name(value: object) -> str:
    return type(value).__name__
