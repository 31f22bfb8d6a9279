"""A chunk: the unit that is packed, sent, checked and applied. The one walk over a manifest.

Metadata, sender, receiver and tests all go through ``walk``; there is no second account of which
tensor lies where.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from offbeat.weight_sync.manifest import Bytes, Manifest, TensorSpec

__all__ = ["Bytes", "Chunk", "digest_of", "pack", "tensor_views", "walk"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a manifest, without its content."""

    index: int
    nbytes: int
    specs: tuple[TensorSpec, ...]

    @property
    def tensors(self) -> str:
        """Its tensors, for a line about it."""
        if not self.specs:
            return "no tensors"
        first, last = self.specs[0].name, self.specs[-1].name
        return repr(first) if len(self.specs) == 1 else f"{first!r} to {last!r}"


def walk(manifest: Manifest) -> Iterator[Chunk]:
    """All chunks in order, each with its tensors in order."""
    by_chunk: list[list[TensorSpec]] = [[] for _ in manifest.chunk_nbytes]
    for spec in manifest.tensors:
        by_chunk[spec.chunk].append(spec)
    for index, nbytes in enumerate(manifest.chunk_nbytes):
        yield Chunk(index, nbytes, tuple(by_chunk[index]))


def digest_of(data: Bytes) -> str:
    """The digest of a chunk's bytes."""
    return xxhash.xxh3_128_hexdigest(data.data)


def pack(chunk: Chunk, tensors: Mapping[str, Tensor], into: Bytes) -> str:
    """Copy the chunk's tensors into ``into``, in their wire types; its digest.

    Args:
        chunk: What belongs into it.
        tensors: By name; on any device, strided or not, in any type that the wire type can take.
        into: ``chunk.nbytes`` bytes. Every one of them is written, the gaps with zeros.
    """
    end = 0
    for spec in chunk.specs:
        if end < spec.offset:
            into[end : spec.offset] = 0
        end = spec.offset + spec.nbytes
    for name, place in tensor_views(chunk, into):
        place.copy_(tensors[name])
    return digest_of(into)


def tensor_views(chunk: Chunk, data: Bytes) -> list[tuple[str, Tensor]]:
    """The chunk's tensors by name, as views of its bytes, in order.

    They live as long as anybody holds them, and must not be written where ``data`` is read-only.
    """
    flat = _as_tensor(data)
    return [
        (
            spec.name,
            flat[spec.offset : spec.offset + spec.nbytes]
            .view(getattr(torch, spec.dtype))
            .view(spec.shape),
        )
        for spec in chunk.specs
    ]


class _Alias:
    """The same memory, without the mark that it is read-only. It lives as long as its views."""

    def __init__(self, data: Bytes) -> None:
        self._owner = data
        interface = data.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def _as_tensor(data: Bytes) -> Tensor:
    """The same memory as a tensor. Of a read-only array torch would warn, at each chunk."""
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Alias(data)))
