"""Layout of columns: a header and the arrays it describes, before they are written."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.codec.checks import check_array, disorder
from offbeat.transfer_queue.codec.columns import Columns, Ragged
from offbeat.transfer_queue.codec.dtypes import WIRE, typed
from offbeat.transfer_queue.codec.header import (
    LIST,
    Boundaries,
    PayloadHeader,
    Values,
    aligned,
    encode_header,
)
from offbeat.transfer_queue.codec.lists import encode_list

_OFFSET: Final = WIRE["int64"]
_BYTE: Final = WIRE["uint8"]


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Arrays of a payload, in the order of its header."""

    header: bytes
    arrays: list[NDArray[Any]]
    """The arrays as they came, with any strides and byte order."""
    dtypes: list[np.dtype[Any]]
    """Dtype that each is written as: same element, little-endian."""
    starts: list[int]
    """Offset of each in bytes, from the start of the first."""
    nbytes: int
    """Total bytes, with the gaps between the arrays."""


def lay_out(columns: Columns) -> PayloadLayout:
    """Check columns [rows, ...] and describe them.

    Raises:
        SchemaError: A column that cannot be written, by name.
    """
    offsets = _SharedOffsets()
    arrays: list[NDArray[Any]] = []
    dtypes: list[np.dtype[Any]] = []
    described: list[tuple[str, str, int | None]] = []
    for name, column in columns.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers err
            raise SchemaError(repr(name), f"named by a {type(name).__name__}", "named by a str")
        if isinstance(column, list):
            described.append((name, LIST, None))
            arrays.append(np.frombuffer(encode_list(name, column), np.uint8))
            dtypes.append(_BYTE)
            continue
        index = offsets.index_of(name, column) if isinstance(column, Ragged) else None
        values = column.values if isinstance(column, Ragged) else column
        check_array(name, values)
        if index is not None and offsets.arrays[index][-1] != len(values):
            want = f"{offsets.arrays[index][-1]}, by its offsets"
            raise SchemaError(name, f"{len(values)} values", want)
        kind, dtype, values = typed(name, values)
        described.append((name, kind, index))
        arrays.append(values)
        dtypes.append(dtype)
    header = PayloadHeader(
        (1,),
        tuple(Boundaries(len(each), 0) for each in offsets.arrays),
        tuple(
            Values(name, kind, array.shape, 0, index)
            for (name, kind, index), array in zip(described, arrays, strict=True)
        ),
    )
    dtypes = [*[_OFFSET] * len(offsets.arrays), *dtypes]
    arrays = [*offsets.arrays, *arrays]
    starts, end = list[int](), 0
    for array in arrays:
        starts.append(aligned(end) if array.nbytes else end)
        end = starts[-1] + array.nbytes
    return PayloadLayout(encode_header(header), arrays, dtypes, starts, end)


class _SharedOffsets:
    """Offsets of all ragged columns, each array once."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[np.int64]] = []
        self._indexes: dict[int, int] = {}  # index by id: the columns keep the arrays alive

    def index_of(self, column: str, ragged: Ragged) -> int:
        found = self._indexes.get(id(ragged.offsets))
        if found is None:
            found = self._indexes[id(ragged.offsets)] = len(self.arrays)
            self.arrays.append(_checked(column, ragged.offsets))
        return found


def _checked(column: str, offsets: NDArray[Any]) -> NDArray[np.int64]:
    """Return the offsets [rows + 1] as they are written, or refuse them."""
    want = "int64 offsets [rows + 1]: 0 first, never falling"
    check_array(column, offsets)
    if offsets.dtype.kind not in "iu":
        raise SchemaError(column, f"ragged by offsets of dtype {offsets.dtype}", want)
    if (problem := disorder(offsets)) is not None:
        raise SchemaError(column, f"ragged by {problem}", want)
    return np.ascontiguousarray(offsets, _OFFSET)
