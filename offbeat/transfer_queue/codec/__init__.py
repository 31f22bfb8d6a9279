"""Columns in and out of bytes: views where they can be, typed refusals where they cannot.

``pack``/``unpack`` use one buffer with a digest, ``to_parts``/``from_parts`` a header and buffers that
are handed on without a copy. Neither runs code that came with the bytes. numpy and msgpack only.
"""

from offbeat.transfer_queue.codec.columns import (
    Column,
    Columns,
    Ragged,
    concat,
    rows_of,
    slice_rows,
)
from offbeat.transfer_queue.codec.dtypes import BFLOAT16
from offbeat.transfer_queue.codec.errors import CorruptPayload, UnusableBuffer
from offbeat.transfer_queue.codec.packed import (
    digest_of,
    pack,
    pack_into,
    packed_size,
    unpack,
)
from offbeat.transfer_queue.codec.parts import from_parts, to_parts

__all__ = [
    "BFLOAT16",
    "Column",
    "Columns",
    "CorruptPayload",
    "Ragged",
    "UnusableBuffer",
    "concat",
    "digest_of",
    "from_parts",
    "pack",
    "pack_into",
    "packed_size",
    "rows_of",
    "slice_rows",
    "to_parts",
    "unpack",
]
