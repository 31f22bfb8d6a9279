"""Manifest of a transfer: every tensor's name, shape, dtypes and offset in a chunk. Pure.

A manifest is created once and is the only description of a transfer. Metadata, sender, receiver and
tests all use ``offbeat.weight_sync.chunks.walk``, so they cannot disagree on the layout. A chunk's
digest depends only on its bytes, not on the kind of memory that holds them. This module does not
import torch.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.messages.weights import Canary
from offbeat.weight_sync.dtypes import ITEMSIZE
from offbeat.weight_sync.region import Region

if TYPE_CHECKING:
    from offbeat.weight_sync.chunks import BucketMemory


Bytes = NDArray[np.uint8]
ALIGNMENT: Final = 64  # bytes; start of every tensor, after any types


class TensorSpec(msgspec.Struct, frozen=True):
    """Tensor as it is sent."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]
    dtype: str  # on the wire
    chunk: int
    offset: int  # bytes from the start of its chunk
    source_dtype: str = ""  # the trainer's dtype; empty: same as on the wire

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class PieceSpec(msgspec.Struct, frozen=True, array_like=True):
    """Region of a tensor as it is sent."""

    tensor: int  # index in the manifest's tensors
    region: Region
    chunk: int
    offset: int  # bytes from the start of its chunk


class Adapter(msgspec.Struct, frozen=True):
    """Base and scale of a release that holds only low-rank adapters."""

    base: str  # digest of the files of the model that the adapters were trained on
    rank: int
    alpha: float
    kind: str  # name of the plug-in that adds them to the weights of an engine

    @property
    def scaling(self) -> float:
        """Return the factor by which an adapter's product is added to its matrix."""
        return self.alpha / self.rank


class Manifest(msgspec.Struct, frozen=True):
    """All tensors of a transfer, in order."""

    tensors: tuple[TensorSpec, ...]
    chunk_nbytes: tuple[int, ...]
    digest: str  # digest of everything above
    # Digests of one release's content; empty before it is packed
    chunk_digests: tuple[str, ...] = ()
    canary: Canary | None = None  # canary of one release; None: served without a canary
    adapter: Adapter | None = None  # None: the tensors are the whole model
    # Regions in the order of the chunks, or empty if chunks hold whole tensors. With regions, only
    # name, shape and dtypes of ``tensors`` are valid.
    pieces: tuple[PieceSpec, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(self.chunk_nbytes)

    def describes_as(self, other: "Manifest") -> bool:
        """Return whether both have the same tensors at the same offsets. Content may differ."""
        mine, others = (self.digest, self.chunk_nbytes), (other.digest, other.chunk_nbytes)
        return mine == others and self.tensors == other.tensors and self.pieces == other.pieces

    def seal(self, chunk_digests: Sequence[str]) -> "Manifest":
        """Return the manifest of one release, with the digests that a receiver checks."""
        return msgspec.structs.replace(self, chunk_digests=tuple(chunk_digests))


class TensorMeta(msgspec.Struct, frozen=True):
    """Name, shape and dtype of a tensor, without a reference to its memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # on the wire
    source_dtype: str = ""


def plan(
    tensors: Iterable[TensorMeta | tuple[str, tuple[int, ...], str]],
    chunk_bytes: int,
    adapter: Adapter | None = None,
) -> Manifest:
    """Lay out tensors in chunks of at most ``chunk_bytes``. A larger tensor gets a separate chunk.

    A tensor is never split, so a receiver can pass each chunk to a loader of whole tensors.

    Args:
        tensors: ``(name, shape, wire dtype)`` in the order that both ends use.
        chunk_bytes: Maximum size of a chunk, padding included.
        adapter: How engines apply the tensors, if they are only adapters.
    """
    specs, sizes, end = list[TensorSpec](), list[int](), 0
    for each in tensors:
        meta = each if isinstance(each, TensorMeta) else TensorMeta(*each)
        start = -(-end // ALIGNMENT) * ALIGNMENT
        place = meta.name, meta.shape, meta.dtype, len(sizes), start, meta.source_dtype
        spec = TensorSpec(*place)
        if end and start + spec.nbytes > chunk_bytes:
            sizes.append(end)
            spec = msgspec.structs.replace(spec, chunk=len(sizes), offset=0)
        specs.append(spec)
        end = spec.offset + spec.nbytes
    if specs:
        sizes.append(end)
    encoded = msgspec.msgpack.encode((specs, sizes, adapter) if adapter else (specs, sizes))
    digest = xxhash.xxh3_128_hexdigest(encoded)
    return Manifest(tuple(specs), tuple(sizes), digest, adapter=adapter)


def release_digest(manifest: Manifest, chunk_digests: Iterable[str]) -> str:
    """Return one digest over layout and content."""
    return xxhash.xxh3_128_hexdigest("\n".join((manifest.digest, *chunk_digests)).encode())


def on_host(data: "BucketMemory") -> Bytes:
    """Return the bytes in main memory, copied only if they are on a device."""
    return data if isinstance(data, np.ndarray) else data.cpu().numpy()


def digest_bytes(data: "BucketMemory") -> str:
    """Return the digest of the bytes."""
    return xxhash.xxh3_128_hexdigest(on_host(data).data)
