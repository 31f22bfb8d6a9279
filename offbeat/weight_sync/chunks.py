"""Chunks: the units in which weights are packed, sent, checked and applied.

Metadata, sender, receiver and tests all use ``walk``; there is no second definition of the layout.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
# torch declares some functions without types. Its calls on lists of tensors have private names,
# which it exports without declaring it.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from offbeat.weight_sync.manifest import Bytes, Manifest, PieceSpec, TensorSpec, digest_of, on_host
from offbeat.weight_sync.region import Region

__all__ = [
    "BucketMemory",
    "Bytes",
    "ReleasePart",
    "WeightChunk",
    "as_bytes",
    "hash_tensors",
    "pack",
    "parts_of",
    "tensor_views",
    "walk",
]


BucketMemory = Bytes | Tensor
"""Bytes of a chunk: an array, or a one-dimensional tensor of uint8, which may lie on a device."""


class ChunkSlice(NamedTuple):
    """Adjacent tensors of one dtype in a chunk, cut by one call: a call per tensor adds up."""

    dtype: torch.dtype
    start: int  # bytes from the start of the chunk
    end: int
    # Elements of the first tensor, of the gap after it, of the second tensor, ...
    cuts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class WeightChunk:
    """One chunk of a manifest, without its content. Its layout is computed once and cached."""

    index: int
    nbytes: int
    specs: tuple[TensorSpec, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of its tensors, in order."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def runs(self) -> tuple[ChunkSlice, ...]:
        """Slices of its tensors."""
        runs, specs = list[ChunkSlice](), list(self.specs)
        while specs:
            count = next((i for i, s in enumerate(specs) if s.dtype != specs[0].dtype), len(specs))
            runs.append(_run(specs[:count]))
            del specs[:count]
        return tuple(runs)

    @property
    def tensors(self) -> str:
        """Names of its tensors in a short form for messages."""
        if not self.specs:
            return "no tensors"
        first, last = self.specs[0].name, self.specs[-1].name
        return repr(first) if len(self.specs) == 1 else f"{first!r} to {last!r}"


def walk(manifest: Manifest) -> Iterator[WeightChunk]:
    """Yield all chunks in order, each with its tensors in order."""
    by_chunk: list[list[TensorSpec]] = [[] for _ in manifest.chunk_nbytes]
    pieces = [_piece(manifest, piece) for piece in manifest.pieces]
    for spec in pieces or manifest.tensors:
        by_chunk[spec.chunk].append(spec)
    for index, nbytes in enumerate(manifest.chunk_nbytes):
        yield WeightChunk(index, nbytes, tuple(by_chunk[index]))


class ReleasePart(NamedTuple):
    """A tensor of a release, or a region of one, as ``walk`` names it."""

    name: str
    tensor: str
    region: Region  # of the tensor
    chunk: int


def parts_of(manifest: Manifest) -> Iterator[ReleasePart]:
    """Yield what the chunks of a release consist of, chunk by chunk, in order."""
    for piece in manifest.pieces:
        spec = _piece(manifest, piece)
        yield ReleasePart(spec.name, manifest.tensors[piece.tensor].name, piece.region, spec.chunk)
    for spec in () if manifest.pieces else manifest.tensors:
        yield ReleasePart(spec.name, spec.name, Region.whole(spec.shape), spec.chunk)


def _piece(manifest: Manifest, piece: PieceSpec) -> TensorSpec:
    """Return a region as a tensor of its own, named after it: ``w[0:2, 0:4]``."""
    whole = manifest.tensors[piece.tensor]
    name, shape = f"{whole.name}{piece.region}", piece.region.shape
    return TensorSpec(name, shape, whole.dtype, piece.chunk, piece.offset, whole.source_dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as [nbytes] uint8; a copy only if it is strided."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def hash_tensors(chunk: WeightChunk, tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of the chunk that ``pack`` returns, without memory for the whole chunk."""
    digest, end = xxhash.xxh3_128(), 0
    for spec in chunk.specs:
        digest.update(bytes(spec.offset - end))
        tensor = tensors[spec.name].detach().to(getattr(torch, spec.dtype))
        digest.update(on_host(as_bytes(tensor)).data)
        end = spec.offset + spec.nbytes
    digest.update(bytes(chunk.nbytes - end))
    return digest.hexdigest()


def pack(chunk: WeightChunk, tensors: Mapping[str, Tensor], into: BucketMemory) -> str:
    """Copy the chunk's tensors into ``into``, in their wire dtypes; return its digest.

    Args:
        chunk: Layout of the chunk.
        tensors: Tensors by name; on any device, strided or not, in any dtype that converts to the
            wire dtype.
        into: ``chunk.nbytes`` bytes. All are written, the gaps with zeros.
    """
    flat, views, last = _as_tensor(into), list[Tensor](), 0
    with torch.no_grad():
        for run in chunk.runs:
            flat[last : run.start].zero_()
            pieces, last = _pieces(flat, run), run.end
            if gaps := pieces[1::2]:
                torch._foreach_zero_(gaps)
            views += _shaped(pieces, run)
        torch._foreach_copy_(views, [tensors[name] for name in chunk.names])
    return digest_of(into)


def tensor_views(chunk: WeightChunk, data: BucketMemory) -> list[tuple[str, Tensor]]:
    """Return the chunk's tensors by name, as views of its bytes, in order.

    The views keep the memory alive, and must not be written where ``data`` is read-only.
    """
    flat = _as_tensor(data)
    views = [view for run in chunk.runs for view in _shaped(_pieces(flat, run), run)]
    return list(zip(chunk.names, views, strict=True))


def _run(specs: list[TensorSpec]) -> ChunkSlice:
    dtype = getattr(torch, specs[0].dtype)
    size, sizes = dtype.itemsize, [spec.nbytes for spec in specs]
    ends = [spec.offset + nbytes for spec, nbytes in zip(specs, sizes, strict=True)]
    cuts = list[int]()
    for (_, after), nbytes, end in zip(pairwise(specs), sizes, ends, strict=False):
        cuts += [nbytes // size, (after.offset - end) // size]
    cuts.append(sizes[-1] // size)
    shapes = tuple(spec.shape for spec in specs)
    return ChunkSlice(dtype, specs[0].offset, ends[-1], tuple(cuts), shapes)


def _pieces(flat: Tensor, run: ChunkSlice) -> list[Tensor]:
    """Split into the tensors and the gaps after them, alternating, all one-dimensional."""
    return list(flat[run.start : run.end].view(run.dtype).split(run.cuts))


def _shaped(pieces: list[Tensor], run: ChunkSlice) -> list[Tensor]:
    return [
        piece if len(shape) == 1 else piece.view(shape)
        for piece, shape in zip(pieces[::2], run.shapes, strict=True)
    ]


class _Alias:
    """Writable alias of read-only memory. It lives as long as its views."""

    def __init__(self, data: Bytes) -> None:
        self._owner = data
        interface = data.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def _as_tensor(data: BucketMemory) -> Tensor:
    """Return a tensor that shares the memory; torch would warn about a read-only array."""
    if isinstance(data, Tensor):
        return data
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Alias(data)))
