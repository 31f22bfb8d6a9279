"""Flat, contiguous, aligned views of memory."""

import mmap
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.transfer_queue.codec.errors import UnusableBuffer
from offbeat.transfer_queue.codec.header import ALIGNMENT

Bytes = NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | mmap.mmap | NDArray[Any]
"""Any object with a buffer; for a ``SharedMemory`` pass its ``buf``."""

_WIDEST: Final = 8
"""Bytes of the widest element: memory that starts on a multiple of it suits every type."""


def new_memory(nbytes: int) -> Bytes:
    """Return uninitialised bytes that start on a multiple of 64."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address(memory) % ALIGNMENT
    return memory[start : start + nbytes]


def flat(buffer: Buffer) -> Bytes:
    """Return all bytes of a buffer, as a view that is writable if the buffer is.

    Raises:
        UnusableBuffer: It has gaps, or does not start on a multiple of 8 bytes.
    """
    if not memoryview(cast("bytes", buffer)).c_contiguous:
        raise UnusableBuffer("memory with gaps", "contiguous memory")
    memory = np.frombuffer(buffer, np.uint8)
    if memory.nbytes and address(memory) % _WIDEST:
        raise UnusableBuffer(
            f"memory that starts {address(memory) % _WIDEST} bytes off",
            f"memory that starts on a multiple of {_WIDEST} bytes: copy it to such",
        )
    return memory


def copy_into(memory: Bytes, start: int, array: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Write an array [rows, ...] to ``memory[start:]`` as ``dtype``, without gaps.

    Bytes are swapped if need be.
    """
    np.copyto(np.ndarray(array.shape, dtype, memory, start), array)


def flat_bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> Bytes:
    """Return the bytes [nbytes] of an array of any shape as ``dtype``, without gaps.

    A view if that is how they lie, else a copy.
    """
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)


def memory_at(start: int, nbytes: int, owner: object) -> Bytes:
    """Return a writable view of the bytes from address ``start``.

    The view keeps ``owner`` alive.
    """
    return np.asarray(_Span(start, nbytes, owner))


def address(memory: NDArray[Any]) -> int:
    """Return the address of the first element of an array, [nbytes] or of any other shape."""
    return memory.__array_interface__["data"][0]


class _Span:
    def __init__(self, start: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (start, False),
        }
