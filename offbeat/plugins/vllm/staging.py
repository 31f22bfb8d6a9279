"""Shared memory between an engine actor and vLLM's workers: one copy of the weights, reused.

It has no name in any file system, so a killed process leaves nothing behind.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import ALIGNMENT, Bytes, Manifest


class StagingArea:
    """Shared memory owned by the actor. Workers of the same machine and user map it by its path."""

    def __init__(self) -> None:
        self._file = os.memfd_create("offbeat-weights", os.MFD_CLOEXEC)
        self._memory: Bytes = np.empty(0, np.uint8)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def reserve(self, nbytes: int) -> bool:
        """Grow to ``nbytes`` if needed; return whether workers must map the memory again."""
        if nbytes <= self.nbytes:
            return False
        os.ftruncate(self._file, nbytes)
        self._memory = np.frombuffer(mmap.mmap(self._file, nbytes), np.uint8)
        return True

    def fill(self, chunks: Sequence[Bytes]) -> list[int]:
        """Copy chunks into the memory one after the other and return their offsets.

        The copies are not hashed. Each reader hashes the bytes that it reads.
        """
        offsets, end = list[int](), 0
        for chunk in chunks:
            offsets.append(end)
            np.copyto(self._memory[end : end + chunk.nbytes], chunk)
            end += -(-chunk.nbytes // ALIGNMENT) * ALIGNMENT
        return offsets

    def close(self) -> None:
        """Release the memory. The mappings of workers stay valid."""
        self._memory = np.empty(0, np.uint8)
        os.close(self._file)


def room_for(sizes: Sequence[int]) -> int:
    """Return the number of bytes that chunks of these sizes need in the area."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def check_sizes(epoch: int, manifest: Manifest, chunks: Sequence[Bytes]) -> None:
    """Check that chunks match a release in number and size, and that each has a digest.

    Raises:
        TransferRefused: They do not match.
    """
    got, want = [chunk.nbytes for chunk in chunks], list(manifest.chunk_nbytes)
    for index, (size, expected) in enumerate(zip(got, want, strict=False)):
        if size != expected:
            raise TransferRefused(epoch, f"size of chunk {index}", str(size), str(expected))
    if len(got) != len(want):
        raise TransferRefused(epoch, "chunks received", str(len(got)), str(len(want)))
    if len(manifest.chunk_digests) != len(want):
        hashed = str(len(manifest.chunk_digests))
        raise TransferRefused(epoch, "digests of chunks", hashed, str(len(want)))
