"""Packs what the page shows into base64: a JSON tree whose numeric columns are binary.

No byte of a run can be read as HTML in this form. ``web/data.js`` is the other side.

    gzip( u32 length of the head | head: JSON | columns )

A column stands in the tree as ``{"$": [kind, offset, count]}``. Columns of four-byte numbers are
stored byte plane by byte plane: all first bytes, then all second bytes, which halves what gzip
leaves of slowly varying numbers.
"""

import base64
import gzip
import struct
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]
_KEPT_BITS: Final = 12  # of a float's mantissa: four significant digits; a chart shows three
_KINDS: Final = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "f4": "<f4"}


def packed(tree: object) -> str:
    """Return the tree as base64 text. Arrays may stand anywhere in it; NaN is kept."""
    columns = bytearray()
    head = msgspec.json.encode(_with_references(tree, columns))
    blob = struct.pack("<I", len(head)) + head + bytes(columns)
    # The time stamp of gzip is left out: the same run gives the same page.
    return base64.b64encode(gzip.compress(blob, 9, mtime=0)).decode()


def _with_references(tree: object, columns: bytearray) -> object:
    if isinstance(tree, np.ndarray):
        return _reference(cast("AnyArray", tree), columns)
    if isinstance(tree, dict):
        members = cast("dict[str, object]", tree)
        return {key: _with_references(value, columns) for key, value in members.items()}
    if isinstance(tree, list | tuple):
        items = cast("list[object]", tree)
        return [_with_references(item, columns) for item in items]
    return tree


def _reference(column: AnyArray, columns: bytearray) -> dict[str, list[str | int]]:
    kind = f"{column.dtype.kind}{column.dtype.itemsize}"
    if column.dtype.kind == "f":
        kind, column = "f4", _rounded(column)
    stored = np.ascontiguousarray(column, dtype=_KINDS[kind])
    place: list[str | int] = [kind, len(columns), len(stored)]
    if stored.itemsize == 1:
        columns += stored.tobytes()
    else:
        planes = stored.view(np.uint8).reshape(-1, stored.itemsize).T
        columns += np.ascontiguousarray(planes).tobytes()
    return {"$": place}


def _rounded(column: AnyArray) -> NDArray[np.float32]:
    """Round to ``_KEPT_BITS`` of the mantissa: the bits that no chart shows do not compress."""
    dropped = 23 - _KEPT_BITS
    with np.errstate(over="ignore"):
        values = column.astype(np.float32)
    finite = np.isfinite(values)
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = ((bits + (1 << (dropped - 1))) >> dropped) << dropped
    rounded = nearest.astype(np.uint32).view(np.float32)
    return np.where(finite & np.isfinite(rounded), rounded, values)
