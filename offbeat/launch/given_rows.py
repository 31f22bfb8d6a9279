"""Writes prompt rows that a program passes, instead of a path, into a file.

Values of rows are kept unchanged. A value that JSON would change is refused.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Final, cast
from uuid import UUID

from offbeat.config.problems import shorten
from offbeat.messages.bad_json import DEEPEST
from offbeat.messages.failures import FixableError, ShortInNotebooks
from offbeat.messages.text import cut, printable
from offbeat.telemetry.summary import write_atomically

_ARRAY_LIBRARIES: Final = ("numpy", "torch")
_KEPT_KINDS: Final = ("b", "i", "u", "f", "U", "T", "O")
"""Kinds of numpy dtypes that ``tolist`` keeps. For other kinds it can turn a date into a number."""
_FLOAT_BYTES: Final = 8

_LONGEST_PLACE: Final = 60
_OF_MISSING: Final = "Drop the row, or give None, in a DataFrame with frame.convert_dtypes().astype(object).where(frame.notna(), None)"
_MISSING: Final = ("NAType", "NaTType")
"""Classes of pandas for a missing value."""
_OTHER: Final = "Give numbers, text, lists and dicts. Pictures are read from files that a row names"
_UNKNOWN: Final = "has the type {}, which JSON cannot hold"
_CHANGED: Final = "has the type {}, but would come back as "
_REASONS: Final[tuple[tuple[type | tuple[type, ...], str, str], ...]] = (
    (Enum, "is an Enum ({}), of which only the value would come back", "Give VALUE.value"),
    (tuple, "is a tuple, but would come back as a list", "Give list(VALUE), or VALUE._asdict()"),
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
"""Types, the problem with values of these types, and the fix. The first match counts."""


class UnkeptValue(Exception):
    """A prompt file cannot hold a key or a value. The error has the reason and the fix."""

    def __init__(self, what: str, problem: str, fix: str) -> None:
        super().__init__(f"{printable(what)} {problem}")
        self.fix = fix


def keep_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row in types that JSON can hold, with equal values at every depth.

    Arrays of numpy and torch become lists, their numbers become Python numbers, and mappings become
    dicts.

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
            problem = f"has the type {_type_name(key)}, but keys of JSON are text"
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
        problem, fix = "is not finite, but JSON has no such number", "Give a finite number, or None"
    raise UnkeptValue(f"{place} = {value}", problem, fix)


def _is_array(value: Any) -> bool:  # noqa: ANN401 -- as above
    """Return whether ``tolist`` turns a value into lists and numbers without loss."""
    if type(value).__module__.partition(".")[0] not in _ARRAY_LIBRARIES:
        return False
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "tolist") or hasattr(value, "mask"):
        return False
    kind = getattr(dtype, "kind", "O")  # dtypes of torch have no kind
    return kind in _KEPT_KINDS and (kind != "f" or dtype.itemsize <= _FLOAT_BYTES)


def _why_not(value: Any) -> tuple[str, str]:  # noqa: ANN401 -- as above
    """Return why a prompt file cannot hold a value, and the fix."""
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


_SHOWN: Final = 12
"""Hexadecimal digits of the digest in the file name."""
_FORM: Final = 'Give [{"prompt": ...}, ...]'


class BadRows(ShortInNotebooks, FixableError):
    """Prompts passed from Python are not rows, or hold a value that JSON would change.

    Fix: pass a list of dicts of plain values with ``prompt`` or ``messages``.
    """

    form = "{}: {}. {}"


def prompt_path(prompts: Any, folder: Path, argument: str = "prompts") -> str:  # noqa: ANN401 -- of libraries that are not imported
    """Return the path of prompts: the given path, or the path of a file with the given rows.

    Args:
        prompts: A path, a path on the hub, a ``Dataset`` of datasets, a ``DataFrame`` of pandas, or any
            iterable of mappings.
        folder: Where the rows are written. The file name contains their digest. So equal rows have
            the same file, and a resumed run finds it.
        argument: Name of the argument, for errors.

    Raises:
        BadRows: A row is not a mapping, or holds a key or a value that JSON would change.
    """
    if isinstance(prompts, str | os.PathLike):
        return os.fspath(prompts)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] -- of any path
    lines = (_line(argument, at, row) for at, row in enumerate(_rows(argument, prompts)))
    content = "".join(f"{line}\n" for line in lines)
    if not content:
        raise BadRows(
            f"{argument}: there are none", "no row", "Give a list of dicts with a prompt each"
        )
    encoded = content.encode()
    path = folder / f"prompts-{hashlib.sha256(encoded).hexdigest()[:_SHOWN]}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encoded)
    return str(path.absolute())


def _rows(argument: str, prompts: Any) -> Iterable[Any]:  # noqa: ANN401 -- as above
    if hasattr(prompts, "to_dict") and hasattr(prompts, "iloc"):  # of pandas; a Dataset yields rows
        return _rows_of_pandas(argument, prompts)
    got = f"{argument}: {type(prompts).__name__}"
    if isinstance(prompts, Mapping):
        named = cast("Mapping[Any, Any]", prompts)
        splits = [repr(name) for name, rows in named.items() if hasattr(rows, "column_names")]
        fix = f"Give one of its splits: {argument}[{splits[0]}]" if splits else _FORM
        raise BadRows(got, "it is not a list of rows", fix)
    if not hasattr(prompts, "__iter__"):
        raise BadRows(got, "it is not a list of rows", _FORM)
    return prompts


def _rows_of_pandas(argument: str, frame: Any) -> Iterable[Any]:  # noqa: ANN401 -- as above
    """Return the rows of a ``DataFrame``. Refuse it if its index or a column would be lost."""
    if not hasattr(frame, "columns"):
        raise BadRows(f"{argument}: {type(frame).__name__}", "it is one column", "Give a DataFrame")
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        problem, fix = "a row can hold only one of them", "Rename or drop the others"
        raise BadRows(f"{argument}: several columns are called {twice!r}", problem, fix)
    named = [f"is called {name!r}" for name in frame.index.names if name is not None]
    if len(frame) and frame.index.dtype.kind not in "iu":  # numbers only count the rows
        named.append(f"holds {shorten(frame.index[0])}")
    if named:
        problem = "a reward would not see it"
        fix = "Make it a column with frame.reset_index(), or drop it with reset_index(drop=True)"
        raise BadRows(f"{argument}: the index {named[0]}", problem, fix)
    return frame.to_dict("records")


def _line(argument: str, at: int, row: object) -> str:
    place = f"{argument}[{at}]"
    if not isinstance(row, Mapping):
        raise BadRows(f"{place} has the type {type(row).__name__}", "a row is a dict", _FORM)
    try:
        kept = keep_row(row)  # pyright: ignore[reportUnknownArgumentType] -- of any row
    except UnkeptValue as error:
        raise BadRows(place, str(error), error.fix) from error
    return json.dumps(kept, allow_nan=False, ensure_ascii=False)
