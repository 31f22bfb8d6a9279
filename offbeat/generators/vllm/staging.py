"""Memory that an engine actor shares with vLLM's workers: one copy of the weights, always reused.

It has no name in any file system, so nothing is left behind by a process that is killed.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from offbeat.weight_sync.manifest import ALIGNMENT, Bytes


class StagingArea:
    """Owned by the actor; workers of the same machine and user map it by its path."""

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
        """Make room. True: workers have to map it anew."""
        if nbytes <= self.nbytes:
            return False
        os.ftruncate(self._file, nbytes)
        self._memory = np.frombuffer(mmap.mmap(self._file, nbytes), np.uint8)
        return True

    def fill(self, chunks: Sequence[Bytes]) -> list[int]:
        """Copy chunks in, one after the other; the offset of each.

        Nothing is hashed here: whoever reads from this memory hashes what it reads.
        """
        offsets, end = list[int](), 0
        for chunk in chunks:
            offsets.append(end)
            np.copyto(self._memory[end : end + chunk.nbytes], chunk)
            end += -(-chunk.nbytes // ALIGNMENT) * ALIGNMENT
        return offsets

    def close(self) -> None:
        """Give the memory back; what workers have mapped stays theirs."""
        self._memory = np.empty(0, np.uint8)
        os.close(self._file)


def room_for(sizes: Sequence[int]) -> int:
    """Bytes that chunks of these sizes take in the area."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
