"""What a transfer consists of: every tensor's name, shape, wire type and place in a chunk. Pure.

One plan serves metadata, sender, receiver and tests, so that they cannot disagree: a manifest is
made once, and both ends walk ``chunk_tensors`` of it.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import xxhash

ALIGNMENT: Final = 64  # bytes; every tensor starts aligned, whatever the types before it
ITEMSIZE: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4,
                   "uint8": 1, "bool": 1}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor on the wire."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]
    dtype: str  # on the wire
    chunk: int
    offset: int  # bytes from the start of its chunk

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * ITEMSIZE[self.dtype]


class Manifest(msgspec.Struct, frozen=True):
    """All tensors of a transfer, in order."""

    tensors: tuple[TensorSpec, ...]
    chunk_nbytes: tuple[int, ...]
    digest: str  # of everything above

    @property
    def nbytes(self) -> int:
        return sum(self.chunk_nbytes)


def plan(tensors: Iterable[tuple[str, tuple[int, ...], str]], chunk_bytes: int) -> Manifest:
    """Lay tensors out in chunks of at most ``chunk_bytes``; a larger tensor is a chunk of its own.

    Args:
        tensors: ``(name, shape, wire dtype)`` in the order both ends use.
        chunk_bytes: Bound of a chunk, padding included.
    """
    specs, sizes, end = list[TensorSpec](), list[int](), 0
    for name, shape, dtype in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        spec = TensorSpec(name, shape, dtype, len(sizes), start)
        if end and start + spec.nbytes > chunk_bytes:
            sizes.append(end)
            spec = TensorSpec(name, shape, dtype, len(sizes), 0)
        specs.append(spec)
        end = spec.offset + spec.nbytes
    if specs:
        sizes.append(end)
    encoded = msgspec.msgpack.encode((specs, sizes))
    return Manifest(tuple(specs), tuple(sizes), xxhash.xxh3_128_hexdigest(encoded))


def chunk_tensors(manifest: Manifest) -> Iterator[tuple[int, int, list[TensorSpec]]]:
    """The one walk over a transfer: ``(chunk index, chunk bytes, its tensors in order)``."""
    by_chunk: list[list[TensorSpec]] = [[] for _ in manifest.chunk_nbytes]
    for spec in manifest.tensors:
        by_chunk[spec.chunk].append(spec)
    yield from (
        (index, nbytes, specs)
        for index, (nbytes, specs) in enumerate(zip(manifest.chunk_nbytes, by_chunk, strict=True))
    )


def release_digest(manifest: Manifest, chunk_digests: Iterable[str]) -> str:
    """One digest of layout and content together."""
    return xxhash.xxh3_128_hexdigest("\n".join((manifest.digest, *chunk_digests)).encode())
