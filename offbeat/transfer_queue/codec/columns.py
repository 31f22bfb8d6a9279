"""Columns of a payload: dense, ragged and plain ones, with one row per sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths, end to end: row i owns ``values[offsets[i]:offsets[i + 1]]``.

    ``values`` is [N, ...], ``offsets`` [rows + 1] int64: 0 first, never falling, N last. An empty
    row repeats its offset. Columns whose rows have the same lengths may share one ``offsets``
    array: it is written once, and shared again where it is read.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> NDArray[Any]:
        """Return a view of one row, counted from 0: [length of the row, ...]."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]


Column = NDArray[Any] | Ragged | list[Any]
Columns = Mapping[str, Column]
"""Name to column. A dense column is [rows, ...]; a list has an entry per row, made of
None, bool, int (64 bits), float, str, bytes, list, and dict with str keys."""


def rows_of(columns: Columns) -> int:
    """Return the number of rows of the columns, [rows, ...] each; 0 without columns.

    Raises:
        SchemaError: They do not all have as many.
    """
    rows = {name: len(column) for name, column in columns.items()}
    for name, got in rows.items():
        first, want = next(iter(rows.items()))
        if got != want:
            raise SchemaError(name, f"{got} rows", f"{want} rows, as {first!r} has")
    return next(iter(rows.values()), 0)


def concat(payloads: Sequence[Columns]) -> dict[str, Column]:
    """Return the rows of all payloads in order, each column [rows of all, ...].

    A single payload is handed through; several are copied.

    Ragged columns that share offsets in the first payload share them in the result if they do so
    in the others.

    Raises:
        SchemaError: No payload, other columns than in the first, or columns of another kind, type
            or inner shape.
    """
    if not payloads:
        raise SchemaError("payloads", "none", "at least one")
    first, *others = payloads
    if not others:
        return dict(first)
    for payload in others:
        for name in first.keys() ^ payload.keys():
            state = "missing" if name in first else "extra"
            raise SchemaError(name, f"{state} in one payload", "the same columns in all")
    offsets: dict[tuple[int, ...], NDArray[np.int64]] = {}
    return {name: _joined(name, [each[name] for each in payloads], offsets) for name in first}


def _joined(
    name: str, parts: list[Column], offsets: dict[tuple[int, ...], NDArray[np.int64]]
) -> Column:
    """Return one column of the rows of all parts, [rows of all, ...].

    ``offsets`` keeps the joined offsets, [rows of all + 1], by the identities of those joined.
    """
    kinds = [_kind(part) for part in parts]
    for kind in kinds:
        if kind != kinds[0]:
            raise SchemaError(name, f"{kind} in one payload", f"{kinds[0]}, as in the first")
    if kinds[0] == "ragged":
        ragged = cast("list[Ragged]", parts)
        key = tuple(id(part.offsets) for part in ragged)
        if key not in offsets:
            lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
            offsets[key] = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        return Ragged(_stacked(name, [part.values for part in ragged]), offsets[key])
    if kinds[0] == "a list":
        return [row for part in cast("list[list[Any]]", parts) for row in part]
    return _stacked(name, cast("list[NDArray[Any]]", parts))


def _kind(column: Column) -> str:
    """Return what holds the rows: an array [rows, ...], a ``Ragged`` or a list."""
    if isinstance(column, Ragged):
        return "ragged"
    return "a list" if isinstance(column, list) else "dense"


def _stacked(name: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Return parts [rows, ...] behind each other, [rows of all, ...]."""
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            got, want = (f"{each.dtype} with rows {each.shape[1:]}" for each in (part, first))
            raise SchemaError(name, f"{got} in one payload", f"{want}, as in the first")
    return np.concatenate(parts)
