"""Chunks in the memory that the actor fills (``StagingArea``), from the view of one worker."""

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from offbeat.plugins.vllm.load_comparison import Extent, Placed
from offbeat.plugins.vllm.read_back import NotComparable
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import digest_bytes

Staged = list[tuple[int, int, str]]
"""Offset, bytes and digest of each chunk in the shared memory."""


class SharedChunks:
    """Layout and memory of releases that reach a worker through its actor."""

    def __init__(self, rank: int) -> None:
        """``rank``: number of the worker."""
        self._rank = rank
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._planned: list[list[tuple[str, Tensor]]] = []  # views of the memory, by chunk

    def map(self, path: str, nbytes: int) -> None:
        """Map the memory. The actor calls it again whenever the memory has grown."""
        with Path(path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), nbytes)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)

    def plan(self, chunks: list[list[Placed]]) -> None:
        """Store the places of the tensors of each chunk until the next call."""
        self._planned = [[self._view(each) for each in chunk] for chunk in chunks]

    def verify(self, epoch: int, chunks: Staged) -> Sequence[Sequence[tuple[str, Tensor]]]:
        """Check each chunk against the digest it was sent with; return the tensors of all chunks.

        Raises:
            TransferRefused: The digest of a chunk differs.
        """
        for index, extent in enumerate(chunks):
            got, want = self._digest(extent), extent[2]
            if got != want:
                where = f"digest of chunk {index} in worker {self._rank}"
                raise TransferRefused(epoch, where, got, want)
        return self._planned

    def read(self, placed: list[Placed], extent: Extent) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of a chunk of the served release.

        Raises:
            NotComparable: Another release was staged there.
        """
        if self._digest(extent) != extent[2]:
            raise NotComparable(
                "another release has taken the place of the served one in shared memory"
            )
        return map(self._view, placed)

    def _digest(self, extent: Extent) -> str:
        offset, nbytes, _ = extent
        return digest_bytes(self._memory[offset : offset + nbytes].numpy())

    def _view(self, placed: Placed) -> tuple[str, Tensor]:
        name, shape, dtype, offset, nbytes = placed
        data = self._memory[offset : offset + nbytes]
        return name, data.view(getattr(torch, dtype)).view(shape)
