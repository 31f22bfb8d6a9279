"""Header of a payload: dtypes and shapes of its arrays, without positions.

Arrays follow each other in the order of the header (offsets first, then the values of the columns),
each on the next multiple of 64 bytes of the buffer, which ends with the last of them. So no header
can make arrays overlap or be misaligned, and one that does not fit the buffer exactly is refused.
"""

from typing import Annotated, Final, Literal

import msgspec

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.codec.errors import CorruptPayload

VERSION: Final = 1
"""First byte of every header: the version of the format."""

ALIGNMENT: Final = 64
"""Bytes: a cache line, and the alignment that torch and Arrow prefer."""

LIST: Final = "msgpack"
"""Dtype name of a column that is a list; its shape counts the bytes."""

MOST_DIMENSIONS: Final = 32

Count = Annotated[int, msgspec.Meta(ge=0)]


class Boundaries(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Offsets that one or more ragged columns share."""

    length: Count
    buffer: Literal[0]


class Values(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Values of one column; ``offsets`` is an index into the header's, None unless ragged."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    buffer: Literal[0]
    offsets: Count | None


class PayloadHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All arrays of a payload, in the order they are written.

    The format allows for several buffers, each in pieces. Only one, undivided, is used.
    """

    pieces: tuple[Literal[1]]
    offsets: tuple[Boundaries, ...]
    columns: tuple[Values, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PayloadHeader)


def aligned(position: int) -> int:
    """Round up to a multiple of :data:`ALIGNMENT`."""
    return (position + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def encode_header(header: PayloadHeader) -> bytes:
    """Encode the version, then the header as msgpack.

    Raises:
        SchemaError: A column's name is not UTF-8.
    """
    try:
        return bytes((VERSION,)) + _encoder.encode(header)
    except UnicodeEncodeError as error:
        raise SchemaError(
            ascii(error.object), "named by lone surrogates", "a UTF-8 name"
        ) from error


def decode_header(content: bytes | memoryview) -> PayloadHeader:
    """Decode a header. Only its types are checked, and that counts are not negative.

    Raises:
        CorruptPayload: It is of another version, or no header.
    """
    if not content or content[0] != VERSION:
        got = f"version {content[0]}" if content else "empty"
        raise CorruptPayload("header", got, f"version {VERSION}")
    try:
        return _decoder.decode(memoryview(content)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptPayload("header", str(error), "the description of columns") from error
