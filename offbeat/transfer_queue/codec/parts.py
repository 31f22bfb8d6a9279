"""Columns as a small header and a few buffers: what pickle protocol 5 moves without copying it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from offbeat.transfer_queue.codec.columns import Column, Columns
from offbeat.transfer_queue.codec.header import aligned
from offbeat.transfer_queue.codec.layout import Placement, lay_out
from offbeat.transfer_queue.codec.memory import (
    Buffer,
    Bytes,
    copy_into,
    flat,
    flat_bytes,
    new_memory,
)
from offbeat.transfer_queue.codec.reading import read_columns

SHARED_BELOW: Final = 64 * 1024
"""Bytes. Smaller arrays are copied into one common buffer: each buffer of its own costs Ray more."""

PIECE_BYTES: Final = 960 * 1024
"""The most bytes of one buffer. Ray copies a buffer of more than 1 MiB with threads started for it
alone: no faster on few cores, and dearer with each further column."""


def to_parts(columns: Columns) -> tuple[bytes, list[Bytes]]:
    """A header and contiguous buffers, all of them uint8.

    Large contiguous little-endian columns are not copied: their buffers *are* the columns' memory,
    which must not change until it has been handed on. There is no digest: this is for memory that
    is trusted, such as a node's object store.

    Raises:
        SchemaError: A column that cannot be written, by name.
    """
    layout = lay_out(columns, _place)
    common = new_memory(_common_bytes([array.nbytes for array in layout.arrays]))
    whole = [common] if common.nbytes else []
    end = 0
    for array, dtype in zip(layout.arrays, layout.dtypes, strict=True):
        if array.nbytes >= SHARED_BELOW:
            whole.append(flat_bytes(array, dtype))
        elif array.nbytes:
            start, end = aligned(end), aligned(end) + array.nbytes
            copy_into(common, start, array, dtype)
    return layout.header, [piece for buffer in whole for piece in _cut(buffer)]


def from_parts(header: bytes, buffers: Sequence[Buffer]) -> dict[str, Column]:
    """The columns of :func:`to_parts`, as views of the buffers: read-only where those are.

    A column that was cut is a view where its pieces lie side by side, as they do in Ray's object
    store and on the way within a process; elsewhere it is a copy.

    Raises:
        CorruptPayload: The header is not one, or does not fit the buffers exactly.
        UnusableBuffer: A buffer with gaps, or not on a multiple of 8 bytes.
    """
    return read_columns(header, [flat(buffer) for buffer in buffers])


def _place(sizes: Sequence[int]) -> Placement:
    """Buffer 0 for all small arrays if there are any, then a buffer for each large one."""
    common = _common_bytes(sizes)
    large = [size for size in sizes if size >= SHARED_BELOW]
    whole = [common, *large] if common else large
    free = itertools.count(len(whole) - len(large))
    buffers = [next(free) if size >= SHARED_BELOW else 0 for size in sizes]
    return Placement(buffers, tuple(-(-size // PIECE_BYTES) for size in whole))


def _common_bytes(sizes: Sequence[int]) -> int:
    end = 0
    for size in sizes:
        if 0 < size < SHARED_BELOW:
            end = aligned(end) + size
    return end


def _cut(buffer: Bytes) -> Iterator[Bytes]:
    for start in range(0, buffer.nbytes, PIECE_BYTES):
        yield buffer[start : start + PIECE_BYTES]
