"""Chunks: the units in which the weights of a model are packed, sent, checked and applied.

Metadata, sender, receiver and tests all use ``walk``. It is the only definition of the layout.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
# torch declares some functions without types. Its calls on lists of tensors have private names,
# which torch exports without a declaration.

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import (
    Adapter,
    Bytes,
    Manifest,
    PieceSpec,
    TensorSpec,
    digest_bytes,
    on_host,
    plan,
)
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.wire_format import wire_metas, wire_tensors
from offbeat.weight_sync.wire_format_plugin import UnconvertibleWeights

BucketMemory = Bytes | Tensor
"""Bytes of a chunk: an array, or a one-dimensional uint8 tensor, which may be on a device."""


class ChunkSlice(NamedTuple):
    """Adjacent tensors of one dtype in a chunk. One call cuts all of them, which saves time."""

    dtype: torch.dtype
    start: int  # bytes from the start of the chunk
    end: int
    # Elements of the first tensor, of the gap after it, of the second tensor, ...
    cuts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class WeightChunk:
    """Chunk of a manifest, without its content. The layout is computed once and cached."""

    index: int
    nbytes: int
    specs: tuple[TensorSpec, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the chunk's tensors, in order."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def runs(self) -> tuple[ChunkSlice, ...]:
        """Slices of the chunk's tensors."""
        runs, specs = list[ChunkSlice](), list(self.specs)
        while specs:
            count = next((i for i, s in enumerate(specs) if s.dtype != specs[0].dtype), len(specs))
            runs.append(_run(specs[:count]))
            del specs[:count]
        return tuple(runs)

    @property
    def tensors(self) -> str:
        """Names of the chunk's tensors in a short form, for messages."""
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
    """Tensor or region of a release, as ``walk`` names it."""

    name: str
    tensor: str
    region: Region  # of the tensor
    chunk: int


def split_release(manifest: Manifest) -> Iterator[ReleasePart]:
    """Yield the parts of a release, chunk by chunk, in order."""
    for piece in manifest.pieces:
        spec = _piece(manifest, piece)
        yield ReleasePart(spec.name, manifest.tensors[piece.tensor].name, piece.region, spec.chunk)
    for spec in () if manifest.pieces else manifest.tensors:
        yield ReleasePart(spec.name, spec.name, Region.whole(spec.shape), spec.chunk)


def _piece(manifest: Manifest, piece: PieceSpec) -> TensorSpec:
    """Return a region as a separate tensor, named after the region: ``w[0:2, 0:4]``."""
    whole = manifest.tensors[piece.tensor]
    name, shape = f"{whole.name}{piece.region}", piece.region.shape
    return TensorSpec(name, shape, whole.dtype, piece.chunk, piece.offset, whole.source_dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as [nbytes] uint8. Copy it only if the tensor is strided."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def hash_tensors(chunk: WeightChunk, tensors: Mapping[str, Tensor]) -> str:
    """Return the same digest as ``pack``, without allocating the whole chunk."""
    digest, end = xxhash.xxh3_128(), 0
    for spec in chunk.specs:
        digest.update(bytes(spec.offset - end))
        tensor = tensors[spec.name].detach().to(getattr(torch, spec.dtype))
        digest.update(on_host(as_bytes(tensor)).data)
        end = spec.offset + spec.nbytes
    digest.update(bytes(chunk.nbytes - end))
    return digest.hexdigest()


def pack(chunk: WeightChunk, tensors: Mapping[str, Tensor], into: BucketMemory) -> str:
    """Copy the chunk's tensors into ``into`` in their wire dtypes and return its digest.

    Args:
        chunk: Layout of the chunk.
        tensors: Tensors by name, on any device, strided or not. Each dtype must convert to the wire
            dtype.
        into: ``chunk.nbytes`` bytes. All of them are written; gaps are filled with zeros.
    """
    flat, views, last = _as_tensor(into), list[Tensor](), 0
    with torch.no_grad():
        for run in chunk.runs:
            flat[last : run.start].zero_()
            pieces, last = _pieces(flat, run), run.end
            if gaps := pieces[1::2]:
                torch._foreach_zero_(gaps)
            views += _shape(pieces, run)
        torch._foreach_copy_(views, [tensors[name] for name in chunk.names])
    return digest_bytes(into)


def tensor_views(chunk: WeightChunk, data: BucketMemory) -> list[tuple[str, Tensor]]:
    """Return the chunk's tensors by name, as views of its bytes, in order.

    The views keep the memory alive. They must not be written if ``data`` is read-only.
    """
    flat = _as_tensor(data)
    views = [view for run in chunk.runs for view in _shape(_pieces(flat, run), run)]
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
    """Split bytes into one-dimensional tensors, alternating with the gaps after them."""
    return list(flat[run.start : run.end].view(run.dtype).split(run.cuts))


def _shape(pieces: list[Tensor], run: ChunkSlice) -> list[Tensor]:
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
    """Return a tensor that shares the memory, without torch's warning about read-only arrays."""
    if isinstance(data, Tensor):
        return data
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Alias(data)))


def iterate_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers in a fixed order, tied ones once, by first name.

    Two names are tied if they refer to the same elements of the same memory, in the same dtype.
    """
    state = module.state_dict(keep_vars=True)
    for name in _first_names(state):
        yield name, state[name].detach()


def find_tied_names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each weight, keyed by its name in ``iterate_weights``, in that order."""
    return _first_names(module.state_dict(keep_vars=True))


def _first_names(state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    names = dict[tuple[object, ...], list[str]]()
    for name, tensor in state.items():
        names.setdefault(_identity(tensor), []).append(name)
    return {each[0]: each for each in names.values()}


def _identity(tensor: Tensor) -> tuple[object, ...]:
    if not tensor.numel() or tensor.device.type == "meta":
        return (id(tensor),)  # no memory to compare
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's dtype as manifests spell it."""
    return str(tensor.dtype).removeprefix("torch.")


class GatheredSource:
    """Packs a model's weights one chunk at a time. The model may be sharded over several ranks.

    Rank 0 iterates over ``chunks`` while the other ranks call ``take_part``. The manifest is
    created once, because names, shapes and dtypes do not change during a run.
    """

    def __init__(
        self,
        metas: Iterable[tuple[str, tuple[int, ...], str]],
        named: Callable[[], Iterator[tuple[str, Tensor]]],
        chunk_bytes: int,
        policy: WirePolicy | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Lay out the weights.

        Args:
            metas: Name, shape and dtype of every weight, in the order of ``named``.
            named: Iterates over the whole weights. All ranks must iterate together.
            chunk_bytes: Maximum size of a chunk.
            policy: Wire formats of the tensors.
            adapter: How engines apply the tensors, if these are only adapters.

        Raises:
            OffbeatError: Tensors cannot be converted to these formats.
        """
        self._policy, self._named = policy or WirePolicy(), named
        self.manifest: Manifest = plan(wire_metas(metas, self._policy), chunk_bytes, adapter)
        self._chunks = list(walk(self.manifest))

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        """Yield each chunk's bytes and digest. A chunk is a snapshot, taken when it is yielded.

        Args:
            room: ``(chunk index, bytes)`` -> memory for the packed chunk. By default new memory.

        Raises:
            UnconvertibleWeights: The wire format cannot represent a matrix.
        """
        gathered = self._named()
        weights = wire_tensors(gathered, self._policy)
        for chunk in self._chunks:
            try:
                tensors = dict(next(weights) for _ in chunk.specs)
            except UnconvertibleWeights:
                for _ in gathered:  # the other ranks iterate to the end
                    pass
                raise
            into = room(chunk.index, chunk.nbytes) if room else np.empty(chunk.nbytes, np.uint8)
            digest = pack(chunk, tensors, into)
            del tensors  # free them before the next gather: each may be a fused matrix of GiB
            yield into, digest

    def digests(self) -> Iterator[str]:
        """Yield the same digest of each chunk as ``chunks``, without packing.

        Tensors in main memory are hashed in place. Other tensors are copied one at a time.
        """
        weights = wire_tensors(self._named(), self._policy)
        for chunk in self._chunks:
            yield hash_tensors(chunk, dict(next(weights) for _ in chunk.specs))

    def take_part(self) -> None:
        """Join the gathering while rank 0 iterates over all chunks."""
        for _ in self._named():
            pass
