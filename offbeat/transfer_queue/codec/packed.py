"""Columns as one buffer for disks, shared memory and other nodes: aligned, with a digest.

64 bytes of preamble (magic, digest, length of all, length of the header), the header, and on the
next multiple of 64 the arrays, each on a multiple of 64. The digest, xxh3_128, covers every byte
after itself, padding included, and the magic is compared: no byte can change unnoticed.
"""

import struct
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.transfer_queue.codec.columns import Column, Columns
from offbeat.transfer_queue.codec.errors import CorruptPayload, UnusableBuffer
from offbeat.transfer_queue.codec.header import aligned
from offbeat.transfer_queue.codec.layout import PayloadLayout, lay_out
from offbeat.transfer_queue.codec.memory import (
    Buffer,
    Bytes,
    copy_into,
    flat,
    flat_bytes,
    new_memory,
)
from offbeat.transfer_queue.codec.reading import read_columns

MAGIC: Final = b"offbeatQ"
_PREAMBLE: Final = struct.Struct("<8s16sQI28x")  # magic, digest, bytes of all, bytes of header
_DIGESTED: Final = 24  # the digest covers everything from here
_BLOCK: Final = 256 * 1024  # copied, then digested while still in the cache


def packed_size(columns: Columns) -> int:
    """Return the bytes that :func:`pack_into` writes of columns [rows, ...].

    It costs as much as packing without the copy.

    Raises:
        SchemaError: A column cannot be written; names it.
    """
    return _size(lay_out(columns))


def pack(columns: Columns) -> Bytes:
    """Return columns [rows, ...] in new memory [nbytes] that starts on a multiple of 64 bytes.

    Columns are written little-endian and without gaps, whatever their layout in memory.

    Raises:
        SchemaError: A column cannot be written; names it.
    """
    layout = lay_out(columns)
    memory = new_memory(_size(layout))
    _write(layout, memory)
    return memory


def pack_into(buffer: Buffer, columns: Columns) -> int:
    """Write columns [rows, ...] to the front of ``buffer``; return the number of bytes written.

    The rest of the buffer is left alone.

    The rest of the buffer is unchanged. The preamble is cleared first and written last: a writer
    that dies leaves nothing that unpacks.

    Raises:
        SchemaError: A column cannot be written; names it. Nothing was written.
        UnusableBuffer: Too small, read-only, with gaps, or not on a multiple of 8 bytes. Nothing
            was written.
    """
    layout = lay_out(columns)
    memory, size = flat(buffer), _size(layout)
    if not memory.flags.writeable:
        raise UnusableBuffer("read-only", "memory that may be written")
    if memory.nbytes < size:
        raise UnusableBuffer(f"{memory.nbytes} bytes", f"{size} bytes: ask packed_size first")
    _write(layout, memory[:size])
    return size


def unpack(buffer: Buffer, *, verify: bool = True) -> dict[str, Column]:
    """Return the columns at the front of ``buffer``, [rows, ...] each, as views of it.

    They are read-only if it is, and valid while it is.

    Only lists are copied. Bytes after the payload are ignored. ``verify=False`` skips the digest
    and nothing else: damage to values is then not detected, damage to the structure is.

    Raises:
        CorruptPayload: The bytes are not what ``pack`` wrote.
        UnusableBuffer: With gaps, or not on a multiple of 8 bytes.
    """
    memory = flat(buffer)
    if memory.nbytes < _PREAMBLE.size:
        raise CorruptPayload("length", f"{memory.nbytes} bytes", f"at least {_PREAMBLE.size}")
    magic, digest, size, header_bytes = _PREAMBLE.unpack_from(memory.data)
    if magic != MAGIC:
        raise CorruptPayload("magic", repr(magic), repr(MAGIC))
    body = aligned(_PREAMBLE.size + header_bytes)
    if not body <= size <= memory.nbytes:
        raise CorruptPayload("length", f"{size} bytes", f"{body} to {memory.nbytes} bytes")
    if verify:
        found = xxhash.xxh3_128_digest(memory[_DIGESTED:size].data)
        if found != digest:
            raise CorruptPayload("digest", found.hex(), digest.hex())
    header = memory[_PREAMBLE.size : _PREAMBLE.size + header_bytes].data
    return read_columns(header, memory[body:size])


def digest_of(buffer: Buffer) -> bytes:
    """Return the digest that :func:`pack` wrote into ``buffer``, which identifies the content.

    ``unpack`` checks the content against its digest.

    Raises:
        CorruptPayload: Too short to hold one.
    """
    memory = flat(buffer)
    if memory.nbytes < _PREAMBLE.size:
        raise CorruptPayload("length", f"{memory.nbytes} bytes", f"at least {_PREAMBLE.size}")
    return memory[len(MAGIC) : _DIGESTED].tobytes()


def _size(layout: PayloadLayout) -> int:
    return aligned(_PREAMBLE.size + len(layout.header)) + layout.nbytes


def _write(layout: PayloadLayout, memory: Bytes) -> None:
    memory[: _PREAMBLE.size] = 0
    header_end = _PREAMBLE.size + len(layout.header)
    memory[_PREAMBLE.size : header_end] = np.frombuffer(layout.header, np.uint8)
    preamble = _PREAMBLE.pack(MAGIC, b"", memory.nbytes, len(layout.header))
    writer = _Writer(memory, xxhash.xxh3_128(preamble[_DIGESTED:]), header_end)
    writer.pad()
    for array, dtype in zip(layout.arrays, layout.dtypes, strict=True):
        if array.nbytes:
            writer.pad()
            writer.append(array, dtype)
    digest = writer.digest()
    memory[: _PREAMBLE.size] = np.frombuffer(
        _PREAMBLE.pack(MAGIC, digest, memory.nbytes, len(layout.header)), np.uint8
    )


class _Writer:
    """Copies arrays one after another, and digests each block after writing it."""

    def __init__(self, memory: Bytes, hasher: xxhash.xxh3_128, end: int) -> None:
        self._memory, self._hasher, self._end = memory, hasher, end
        self._digested = _PREAMBLE.size

    def pad(self) -> None:
        start, self._end = self._end, aligned(self._end)
        if start != self._end:
            self._memory[start : self._end] = 0

    def append(self, array: NDArray[Any], dtype: np.dtype[Any]) -> None:
        """Copy an array [rows, ...] behind what was written, as ``dtype``."""
        start = self._end
        if array.nbytes <= _BLOCK or array.dtype != dtype or not array.flags.c_contiguous:
            copy_into(self._memory, start, array, dtype)
            self._written(start + array.nbytes)
            return
        source = flat_bytes(array, dtype)
        for position in range(0, source.nbytes, _BLOCK):
            block = source[position : position + _BLOCK]
            stop = start + position + block.nbytes
            self._memory[start + position : stop] = block
            self._written(stop)

    def digest(self) -> bytes:
        self._hasher.update(self._memory[self._digested : self._end].data)
        return self._hasher.digest()

    def _written(self, end: int) -> None:
        self._end = end
        if end - self._digested >= _BLOCK:
            self._hasher.update(self._memory[self._digested : end].data)
            self._digested = end
