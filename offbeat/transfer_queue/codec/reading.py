"""From a header and buffers to columns: views of the buffers, trusting nothing that either says."""

import itertools
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
from offbeat.transfer_queue.codec.memory import Bytes, join

_TYPES: Final = {**WIRE, LIST: WIRE["uint8"]}
_MOST_BYTES: Final = 2**63 - 1  # what numpy can count


def read_columns(header: bytes | memoryview, buffers: Sequence[Bytes]) -> dict[str, Column]:
    """The columns that ``header`` describes, as views of the buffers.

    Raises:
        CorruptPayload: The header is not one, or does not fit the buffers exactly.
    """
    decoded = decode_header(header)
    arrays = _Arrays(_whole(decoded.pieces, buffers))
    offsets = [_offsets(index, each, arrays) for index, each in enumerate(decoded.offsets)]
    columns: dict[str, Column] = {}
    for each in decoded.columns:
        if each.name in columns:
            raise CorruptPayload(f"column {each.name!r}", "there twice", "different names")
        columns[each.name] = _column(each, arrays, offsets)
    arrays.check_used_up()
    return columns


def _whole(pieces: Sequence[int], buffers: Sequence[Bytes]) -> Sequence[Bytes]:
    """The buffers as they were before they were cut."""
    if sum(pieces) != len(buffers) or not all(pieces):
        raise CorruptPayload("header", f"of {sum(pieces)} buffers", f"{len(buffers)}, as there are")
    ends = itertools.accumulate(pieces)
    return [join(buffers[end - count : end]) for end, count in zip(ends, pieces, strict=True)]


def _offsets(index: int, described: Boundaries, arrays: "_Arrays") -> NDArray[np.int64]:
    field, shape = f"offsets {index}", (described.length,)
    offsets = arrays.take(field, WIRE["int64"], shape, described.buffer)
    if (problem := disorder(offsets)) is not None:
        raise CorruptPayload(field, problem, "[rows + 1]: 0 first, never falling")
    return offsets


def _column(described: Values, arrays: "_Arrays", offsets: Sequence[NDArray[np.int64]]) -> Column:
    field = f"column {described.name!r}"
    dtype = _TYPES.get(described.dtype)
    if dtype is None:
        got = f"of type {described.dtype[:32]!r}"
        raise CorruptPayload(field, got, f"one of {', '.join(_TYPES)}")
    values = arrays.take(field, dtype, described.shape, described.buffer)
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
    """Cuts buffers into arrays, front to back."""

    def __init__(self, buffers: Sequence[Bytes]) -> None:
        self._buffers = buffers
        self._ends = [0] * len(buffers)

    def take(
        self, field: str, dtype: np.dtype[Any], shape: tuple[int, ...], buffer: int
    ) -> NDArray[Any]:
        if not 1 <= len(shape) <= MOST_DIMENSIONS:
            raise CorruptPayload(field, f"of {len(shape)} dimensions", f"1 to {MOST_DIMENSIONS}")
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            if math.prod(extent or 1 for extent in shape) * dtype.itemsize > _MOST_BYTES:
                raise CorruptPayload(field, f"of shape {shape}", "extents that numpy can count")
            return np.ndarray(shape, dtype)  # in no buffer: there may be none
        if buffer >= len(self._buffers):
            raise CorruptPayload(field, f"in buffer {buffer}", f"below {len(self._buffers)}")
        memory, start = self._buffers[buffer], aligned(self._ends[buffer])
        if start + nbytes > memory.nbytes:
            room = max(memory.nbytes - start, 0)
            raise CorruptPayload(field, f"{nbytes} bytes", f"at most the {room} bytes left")
        self._ends[buffer] = start + nbytes
        return np.ndarray(shape, dtype, memory, start)

    def check_used_up(self) -> None:
        for index, (memory, end) in enumerate(zip(self._buffers, self._ends, strict=True)):
            if memory.nbytes != end:
                raise CorruptPayload(f"buffer {index}", f"{memory.nbytes} bytes", f"{end} bytes")
