"""Rows that a program gives instead of a prompt file, and their file."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from offbeat.launch.row_values import UnkeptValue, keep_row
from offbeat.messages.failures import FixableError, ShortInNotebooks
from offbeat.telemetry.summary import write_atomically

_SHOWN: Final = 12
"""Hexadecimal digits of the digest in the file's name."""
_FORM: Final = 'Give [{"prompt": ...}, ...]'


class BadRows(ShortInNotebooks, FixableError):
    """Prompts that were given in Python are no rows, or hold a value that JSON would change."""

    form = "{}: {}. {}"


def prompt_path(prompts: Any, folder: Path, argument: str = "prompts") -> str:  # noqa: ANN401 -- of libraries that are not imported
    """Return the path of prompts: their own, or that of a file with the rows that were given.

    Args:
        prompts: A path, a path on the hub, a ``Dataset`` of datasets, a ``DataFrame`` of pandas, or any
            iterable of mappings.
        folder: Where the rows are written. The name of the file has their digest, so that the same rows
            are the same file, and a resumed run finds them.
        argument: Name of the argument, for errors.

    Raises:
        BadRows: A row is no mapping, or holds a key or a value that JSON would change.
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
        raise BadRows(got, "it is no list of rows", fix)
    if not hasattr(prompts, "__iter__"):
        raise BadRows(got, "it is no list of rows", _FORM)
    return prompts


def _rows_of_pandas(argument: str, frame: Any) -> Iterable[Any]:  # noqa: ANN401 -- as above
    """Return the rows of a ``DataFrame``; refuse a frame of which they are only a part."""
    if not hasattr(frame, "columns"):
        raise BadRows(f"{argument}: {type(frame).__name__}", "it is one column", "Give a DataFrame")
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        problem, fix = "a row can hold only one of them", "Rename or drop the others"
        raise BadRows(f"{argument}: several columns are called {twice!r}", problem, fix)
    if index := [name for name in frame.index.names if name is not None]:
        problem = "a reward would not see it"
        fix = "Make it a column with frame.reset_index(), or drop it with reset_index(drop=True)"
        raise BadRows(f"{argument}: the index is called {index[0]!r}", problem, fix)
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
