"""Encodes columns to bytes and decodes them: as views where possible, else with a typed refusal.

``pack`` writes one buffer with a digest. ``unpack`` runs no code that came with the bytes. numpy and
msgpack only.
"""

from offbeat.transfer_queue.codec.columns import (
    Column,
    Columns,
    Ragged,
    concat,
    rows_of,
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

__all__ = [
    "BFLOAT16",
    "Column",
    "Columns",
    "CorruptPayload",
    "Ragged",
    "UnusableBuffer",
    "concat",
    "digest_of",
    "pack",
    "pack_into",
    "packed_size",
    "rows_of",
    "unpack",
]
