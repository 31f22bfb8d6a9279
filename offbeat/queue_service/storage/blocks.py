"""Columns as a header and one block of memory, written directly to their destination.

Producers put the same dense columns again and again, so their description (names, types, shapes,
offsets) is computed once per shape and cached. Properties that may differ between groups are
checked each time: the values of bool columns, and everything about ragged columns and lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.queue_service.core.records import ColumnSpec
from offbeat.queue_service.storage.arenas import Bytes
from offbeat.transfer_queue import codec
from offbeat.transfer_queue.codec import Column, Columns, Ragged
from offbeat.transfer_queue.codec.checks import check_array, unsound_bools
from offbeat.transfer_queue.codec.dtypes import typed
from offbeat.transfer_queue.codec.layout import lay_out
from offbeat.transfer_queue.codec.memory import address
from offbeat.transfer_queue.codec.reading import read_columns

SHAPES_KNOWN: Final = 256
"""Size at which the cache of shapes is emptied: with ever new shapes it gains nothing."""

_BOOL: Final = np.dtype(np.bool_)
_Place = tuple[int, tuple[int, ...], np.dtype[Any]]  # start, shape, and type it is written as


@dataclass(frozen=True, slots=True)
class Shape:
    """Layout shared by columns of the same names, dtypes and shapes."""

    rows: int
    specs: bytes
    """``ColumnSpec`` records of the columns, in msgpack."""
    header: bytes
    nbytes: int
    """Bytes of the block."""
    places: tuple[_Place, ...]
    bools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Columns that have been checked and described, but not copied yet."""

    shape: Shape
    arrays: Sequence[NDArray[Any]]

    def write(self, memory: Bytes) -> None:
        """Copy the columns into memory of ``shape.nbytes``."""
        for (start, extent, dtype), array in zip(self.shape.places, self.arrays, strict=True):
            if array.nbytes:
                np.copyto(np.ndarray(extent, dtype, memory, start), array)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A header that matched its block, of plain arrays only."""

    places: tuple[tuple[str, _Place], ...]
    bools: tuple[str, ...]


class Blocks:
    """Converts columns to blocks and back, caching shapes. May be used from several threads."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[object, ...], Shape] = {}
        self._seen: dict[tuple[bytes, int], _Seen] = {}

    def of(self, columns: Columns) -> Block:
        """Check and describe the columns.

        Raises:
            SchemaError: A column cannot be written, or differs in length from the first.
        """
        key = _key(columns)
        if key is None:
            return described(columns)
        dense = cast("Mapping[str, NDArray[Any]]", columns)
        shape = self._shapes.get(key)
        if shape is None:
            block = described(columns)
            if all(a is b for a, b in zip(block.arrays, dense.values(), strict=True)):
                _room_in(self._shapes)[key] = block.shape
            return block  # a type of another library, whose arrays are not written as they are
        for name in shape.bools:
            check_array(name, dense[name])
        return Block(shape, tuple(dense.values()))

    def columns_in(self, header: bytes, block: Bytes) -> dict[str, Column]:
        """Return the columns of a block, as views of it.

        Raises:
            CorruptPayload: The header is invalid, or does not fit the block.
        """
        key = header, block.nbytes
        seen = self._seen.get(key)
        if seen is not None:
            arrays = {
                name: np.ndarray(extent, dtype, block, start)
                for name, (start, extent, dtype) in seen.places
            }
            if not any(unsound_bools(arrays[name]) for name in seen.bools):
                return cast("dict[str, Column]", arrays)
        columns = columns_in(header, block)
        if all(isinstance(column, np.ndarray) for column in columns.values()):
            dense = cast("dict[str, NDArray[Any]]", columns)
            places = tuple((name, _place(array, block)) for name, array in dense.items())
            _room_in(self._seen)[key] = _Seen(places, _bools(columns))
        return columns


def columns_in(header: bytes, block: Bytes) -> dict[str, Column]:
    """Return the columns of a block, as views of it, without the cache.

    Raises:
        CorruptPayload: The header is invalid, or does not fit the block.
    """
    return read_columns(header, block)


def _key(columns: Columns) -> tuple[object, ...] | None:
    """Return a cache key, equal for columns of one shape; None unless all are plain arrays."""
    key: list[object] = []
    for name, column in columns.items():
        if type(column) is not np.ndarray:
            return None
        key += (name, column.dtype, column.shape)
    return tuple(key)


def described(columns: Columns) -> Block:
    """Check and describe the columns, without the cache.

    Raises:
        SchemaError: A column cannot be written, or differs in length from the first.
    """
    rows = codec.rows_of(columns)
    layout = lay_out(columns)
    shapes = [array.shape for array in layout.arrays]
    places = tuple(zip(layout.starts, shapes, layout.dtypes, strict=True))
    specs = msgspec.msgpack.encode([_spec(name, column) for name, column in columns.items()])
    shape = Shape(rows, specs, layout.header, layout.nbytes, places, _bools(columns))
    return Block(shape, layout.arrays)


def _spec(name: str, column: Column) -> ColumnSpec:
    if isinstance(column, list):
        return ColumnSpec(name, "object")
    ragged = isinstance(column, Ragged)
    kind, _, _ = typed(name, column.values if ragged else column)
    return ColumnSpec(name, kind, ragged)


def _bools(columns: Columns) -> tuple[str, ...]:
    return tuple(
        name
        for name, column in columns.items()
        if isinstance(column, np.ndarray) and column.dtype == _BOOL
    )


def _place(array: NDArray[Any], block: Bytes) -> _Place:
    start = address(array) - address(block) if array.nbytes else 0
    return start, array.shape, array.dtype


def _room_in(known: dict[Any, Any]) -> dict[Any, Any]:
    if len(known) >= SHAPES_KNOWN:
        known.clear()
    return known
