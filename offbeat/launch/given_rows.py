"""Rows that a program gives instead of a prompt file, and their file."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.messages.failures import FixableError, ShortInNotebooks
from offbeat.telemetry.summary import write_atomically

_SHOWN: Final = 12
"""Hexadecimal digits of the digest in the file's name."""


class BadRows(ShortInNotebooks, FixableError):
    """Prompts that were given in Python are no rows."""

    form = "prompts: {}: {}. {}"


def prompt_path(prompts: Any, folder: Path) -> str:  # noqa: ANN401 -- of libraries that are not imported
    """Return the path of prompts: their own, or that of a file with the rows that were given.

    Args:
        prompts: A path, a path on the hub, a ``Dataset`` of datasets, a ``DataFrame`` of pandas, or any
            iterable of mappings.
        folder: Where the rows are written. The name of the file has their digest, so that the same rows
            are the same file, and a resumed run finds them.

    Raises:
        BadRows: A row is no mapping, or holds what JSON does not know.
    """
    if isinstance(prompts, str | os.PathLike):
        return os.fspath(prompts)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] -- of any path
    content = "".join(f"{_line(number, row)}\n" for number, row in enumerate(_rows(prompts)))
    if not content:
        raise BadRows("there are none", "no row", "Give a list of dicts with a prompt each")
    encoded = content.encode()
    path = folder / f"prompts-{hashlib.sha256(encoded).hexdigest()[:_SHOWN]}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encoded)
    return str(path.absolute())


def _rows(prompts: Any) -> Iterable[Any]:  # noqa: ANN401 -- as above
    to_dict = getattr(prompts, "to_dict", None)
    if to_dict is not None and hasattr(prompts, "iloc"):  # a DataFrame; a Dataset yields rows
        return to_dict("records")
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__iter__"):
        got = type(prompts).__name__  # pyright: ignore[reportUnknownArgumentType] -- of any class
        raise BadRows(got, "it is no list of rows", 'Give [{"prompt": ...}, ...]')
    return prompts


def _line(number: int, row: object) -> str:
    if not isinstance(row, Mapping):
        got = f"row {number} has the type {type(row).__name__}"
        raise BadRows(got, "a row is a dict", 'Give [{"prompt": ...}, ...]')
    try:
        return json.dumps(dict(row), default=_plain, allow_nan=False, ensure_ascii=False)  # pyright: ignore[reportUnknownArgumentType] -- of any row
    except (TypeError, ValueError) as error:
        fix = "Give numbers, text, lists and dicts; pictures are read from files that a row names"
        raise BadRows(f"row {number}", str(error), fix) from error


def _plain(value: Any) -> Any:  # noqa: ANN401 -- what json does not know
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return value.tolist()
    raise TypeError(f"{value!r} has the type {type(value).__name__}")
