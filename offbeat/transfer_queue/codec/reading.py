"""Decodes a header and a buffer to columns, as views of the buffer; neither is trusted."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.transfer_queue.codec.checks import disorder, unsound_bools
from offbeat.transfer_queue.codec.columns import Column, Ragged
from offbeat.transfer_queue.codec.dtypes import WIRE
from offbeat.transfer_queue.codec.errors import CorruptPayload
from offbeat.transfer_queue.codec.header import (
    LIST,
    MOST_DIMENSIONS,
    Boundaries,
    Values,
    aligned,
    decode_header,
)
from offbeat.transfer_queue.codec.lists import decode_list
from offbeat.transfer_queue.codec.memory import Bytes

_TYPES: Final = {**WIRE, LIST: WIRE["uint8"]}
_MOST_BYTES: Final = 2**63 - 1  # what numpy can count


def read_columns(header: bytes | memoryview, buffer: Bytes) -> dict[str, Column]:
    """Return the columns that ``header`` describes, [rows, ...] each, as views of the buffer.

    Raises:
        CorruptPayload: The header is invalid, or does not fit the buffer exactly.
    """
    decoded = decode_header(header)
    arrays = _Arrays(buffer)
    offsets = [_offsets(index, each, arrays) for index, each in enumerate(decoded.offsets)]
    columns: dict[str, Column] = {}
    for each in decoded.columns:
        if each.name in columns:
            raise CorruptPayload(f"column {each.name!r}", "there twice", "different names")
        columns[each.name] = _column(each, arrays, offsets)
    arrays.check_used_up()
    return columns


def _offsets(index: int, described: Boundaries, arrays: "_Arrays") -> NDArray[np.int64]:
    """Return the offsets that come next in the buffer, [rows + 1]."""
    field, shape = f"offsets {index}", (described.length,)
    offsets = arrays.take(field, WIRE["int64"], shape)
    if (problem := disorder(offsets)) is not None:
        raise CorruptPayload(field, problem, "[rows + 1]: 0 first, never falling")
    return offsets


def _column(described: Values, arrays: "_Arrays", offsets: Sequence[NDArray[np.int64]]) -> Column:
    """Return the column that comes next, [rows, ...]; ``offsets`` are [rows + 1] each."""
    field = f"column {described.name!r}"
    dtype = _TYPES.get(described.dtype)
    if dtype is None:
        got = f"of type {described.dtype[:32]!r}"
        raise CorruptPayload(field, got, f"one of {', '.join(_TYPES)}")
    values = arrays.take(field, dtype, described.shape)
    index = described.offsets
    if described.dtype == LIST:
        if values.ndim != 1 or index is not None:
            raise CorruptPayload(field, "a list in two dimensions or ragged", "a plain list")
        return decode_list(field, values.data)
    if (problem := unsound_bools(values)) is not None:
        raise CorruptPayload(field, problem, "bytes of 0 or 1")
    if index is None:
        return values
    if index >= len(offsets):
        raise CorruptPayload(field, f"ragged by offsets {index}", f"below {len(offsets)}")
    if offsets[index][-1] != len(values):
        want = f"{offsets[index][-1]}, by its offsets"
        raise CorruptPayload(field, f"{len(values)} values", want)
    return Ragged(values, offsets[index])


class _Arrays:
    """Splits a buffer into arrays, front to back."""

    def __init__(self, memory: Bytes) -> None:
        self._memory, self._end = memory, 0

    def take(self, field: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the next array, of ``shape`` = [rows, ...], as a view of the buffer."""
        if not 1 <= len(shape) <= MOST_DIMENSIONS:
            raise CorruptPayload(field, f"of {len(shape)} dimensions", f"1 to {MOST_DIMENSIONS}")
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            if math.prod(extent or 1 for extent in shape) * dtype.itemsize > _MOST_BYTES:
                raise CorruptPayload(field, f"of shape {shape}", "extents that numpy can count")
            return np.ndarray(shape, dtype)
        memory, start = self._memory, aligned(self._end)
        if start + nbytes > memory.nbytes:
            room = max(memory.nbytes - start, 0)
            raise CorruptPayload(field, f"{nbytes} bytes", f"at most the {room} bytes left")
        self._end = start + nbytes
        return np.ndarray(shape, dtype, memory, start)

    def check_used_up(self) -> None:
        if self._memory.nbytes != self._end:
            raise CorruptPayload("buffer", f"{self._memory.nbytes} bytes", f"{self._end} bytes")
