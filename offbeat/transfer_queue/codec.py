"""Packs the columns of a group into one buffer with a digest, and reads them as views of it.

The buffer has 64 bytes of preamble (magic, digest, total length, header length), the header, and
the columns from the next multiple of 64. Each column starts on a multiple of 64 and is
little-endian. The digest, xxh3_128, covers every byte after itself, padding included. The magic is
compared too, so a change of any byte is detected. The header is msgpack, so reading it runs no
code.
"""

import struct
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.messages.failures import OffbeatError, SchemaError
from offbeat.transfer_queue.schema import Columns

Bytes = NDArray[np.uint8]

MAGIC: Final = b"offbeatQ"
VERSION: Final = 1
"""First byte of every header: the version of the format."""

DTYPES: Final = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)
"""Element types that a column may have, by numpy's names, which omit the byte order."""

_PREAMBLE: Final = struct.Struct("<8s16sQI28x")  # magic, digest, bytes of all, bytes of header
_DIGESTED: Final = 24  # the digest covers everything from here
_ALIGNMENT: Final = 64  # a cache line, and the alignment that torch prefers


class CorruptPayload(OffbeatError):
    """Bytes that ``pack`` would not write: torn, damaged, or from a different version.

    Fix: none: the group is rolled out again.
    """

    field: str
    got: str
    want: str

    def __str__(self) -> str:
        return (
            f"payload is corrupt: {self.field} is {self.got}; expected {self.want}. "
            "Discard it and roll the group out again"
        )


class _Column(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)]]
    buffer: Literal[0] = 0  # the format allows for several buffers and for nested rows
    offsets: None = None


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All columns of a payload, in the order of writing."""

    pieces: tuple[Literal[1]]
    offsets: tuple[()]
    columns: tuple[_Column, ...]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Header)


def pack(columns: Columns, memory: Bytes | None = None) -> Bytes:
    """Pack columns [rows] to bytes [nbytes]: in ``memory`` if they fit, else in new memory.

    Each column is written without gaps, regardless of its strides in memory.

    Raises:
        SchemaError: A column has several axes, or an element type that the format lacks.
    """
    header = _encode_header(columns)
    end = _align(_PREAMBLE.size + len(header))
    starts = list[int]()
    for values in columns.values():
        starts.append(_align(end) if values.nbytes else end)
        end = starts[-1] + values.nbytes
    if memory is None or memory.nbytes < end:
        memory = np.empty(end, np.uint8)
    packed = memory[:end]
    preamble = _PREAMBLE.pack(MAGIC, b"", end, len(header)) + header
    parts = zip([0, *starts], [np.frombuffer(preamble, np.uint8), *columns.values()], strict=True)
    written = 0
    for start, values in parts:
        packed[written:start] = 0
        written = start + values.nbytes
        if values.nbytes:
            dtype = values.dtype.newbyteorder("<")
            np.copyto(np.ndarray(values.shape, dtype, packed.data, start), values)
    packed[written:] = 0
    packed[len(MAGIC) : _DIGESTED] = np.frombuffer(_compute_digest(packed.data), np.uint8)
    return packed


def unpack(buffer: bytearray | memoryview) -> dict[str, NDArray[Any]]:
    """Return the columns [rows] of a payload as views. They are writable if the payload is.

    Raises:
        CorruptPayload: The bytes differ from the output of ``pack``.
    """
    nbytes = len(buffer)
    if nbytes < _PREAMBLE.size:
        raise CorruptPayload("length", f"{nbytes} bytes", f"at least {_PREAMBLE.size}")
    magic, digest, size, header_bytes = _PREAMBLE.unpack_from(buffer)
    if magic != MAGIC:
        raise CorruptPayload("magic", repr(magic), repr(MAGIC))
    body = _align(_PREAMBLE.size + header_bytes)
    if size != nbytes or body > size:
        raise CorruptPayload("length", f"{size} bytes", f"{nbytes} bytes, at least {body}")
    if (found := _compute_digest(buffer)) != digest:
        raise CorruptPayload("digest", found.hex(), digest.hex())
    header = _decode_header(bytes(buffer[_PREAMBLE.size : _PREAMBLE.size + header_bytes]))
    columns, end = dict[str, NDArray[Any]](), body
    for each in header.columns:
        field, [rows] = f"column {each.name!r}", each.shape
        if each.dtype not in DTYPES:
            raise CorruptPayload(
                field, f"of type {each.dtype[:32]!r}", f"one of {', '.join(DTYPES)}"
            )
        dtype = np.dtype(each.dtype).newbyteorder("<")
        start = _align(end) if rows else end
        end = start + rows * dtype.itemsize
        if end > size:
            raise CorruptPayload(field, f"{rows} rows", "rows within the payload")
        columns[each.name] = np.ndarray(rows, dtype, buffer, start)
    if end != size or len(columns) != len(header.columns):
        raise CorruptPayload("header", "of other columns", "each name once, and all bytes used")
    return columns


def read_digest(buffer: Bytes | bytearray) -> bytes:
    """Return the digest in a payload [nbytes], which identifies its content."""
    return bytes(buffer[len(MAGIC) : _DIGESTED])


def _encode_header(columns: Columns) -> bytes:
    """Return the version and the description of columns [rows]."""
    described = list[_Column]()
    for name, values in columns.items():
        if values.ndim != 1 or values.dtype.name not in DTYPES:
            got = f"{values.dtype} of {values.ndim} dimensions"
            raise SchemaError(name, got, f"one dimension of {', '.join(DTYPES)}")
        described.append(_Column(name, values.dtype.name, values.shape))
    return bytes((VERSION,)) + _encoder.encode(_Header((1,), (), tuple(described)))


def _decode_header(content: bytes) -> _Header:
    if content[:1] != bytes((VERSION,)):
        got = f"version {content[0]}" if content else "empty"
        raise CorruptPayload("header", got, f"version {VERSION}")
    try:
        return _decoder.decode(content[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptPayload("header", str(error), "the description of columns") from error


def _compute_digest(buffer: bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(buffer)[_DIGESTED:])


def _align(position: int) -> int:
    return (position + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
