"""Columns as a header and one block of memory, written straight to where they are to rest."""

from collections.abc import Sequence

from offbeat.transfer_queue import codec
from offbeat.transfer_queue.codec import Column, Columns
from offbeat.transfer_queue.codec.header import aligned
from offbeat.transfer_queue.codec.layout import Placement, lay_out
from offbeat.transfer_queue.codec.memory import copy_into
from offbeat.transfer_queue.storage.arenas import Bytes


class Block:
    """Columns that have been checked and described, and not been copied yet."""

    def __init__(self, columns: Columns) -> None:
        """Describe them.

        Raises:
            SchemaError: A column that cannot be written, by name.
        """
        self._layout = lay_out(columns, _in_one_block)
        self.header = self._layout.header
        self._starts, end = list[int](), 0
        for array in self._layout.arrays:
            start = aligned(end) if array.nbytes else end
            self._starts.append(start)
            end = start + array.nbytes
        self.nbytes = end
        """Of the block."""

    def write(self, block: Bytes) -> None:
        """Copy the columns into a block of ``nbytes``."""
        layout = self._layout
        for array, dtype, start in zip(layout.arrays, layout.dtypes, self._starts, strict=True):
            if array.nbytes:
                copy_into(block, start, array, dtype)


def columns_in(header: bytes, block: Bytes) -> dict[str, Column]:
    """The columns of a block, as views of it.

    Raises:
        CorruptPayload: The header is not one, or does not fit the block.
    """
    return codec.from_parts(header, (block,) if block.nbytes else ())


def _in_one_block(sizes: Sequence[int]) -> Placement:
    return Placement([0] * len(sizes), (1,) if any(sizes) else ())
