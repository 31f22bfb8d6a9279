"""Releases as receivers get them: whole, or the part that a receiver of some regions reads."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.manifest import Manifest, PieceSpec, plan, release_digest
from offbeat.weight_sync.receiver import Receiver


def receive_release(
    receiver: Receiver, epoch: int, manifest: Manifest, chunks: Iterable[Any], digest: str
) -> None:
    """Receive a whole release, verify it and serve it."""
    receiver.begin(epoch, manifest)
    for index, chunk in enumerate(chunks):
        assert receiver.apply(epoch, index, chunk)
    receiver.verify(digest)
    receiver.commit(epoch)


def filled_release(version: int, content: int = 0, *, name: str = "w") -> WeightRelease:
    """Return a release of one small tensor with equal bytes."""
    manifest = plan([(name, (16,), "uint8")], 1024)
    chunk = np.full(16, content, np.uint8)
    digest = release_digest(manifest, [xxhash.xxh3_128_hexdigest(chunk.data)])
    return WeightRelease(version, digest, manifest, (chunk,), 16)


def part_of_release(manifest: Manifest, buckets: Sequence[int]) -> Manifest:
    """Return the manifest of some buckets of a release, which one of several receivers needs."""
    if len(buckets) == len(manifest.chunk_nbytes):
        return manifest
    place = {bucket: index for index, bucket in enumerate(buckets)}
    chosen = [each for each in manifest.pieces if each.chunk in place]
    tensors = sorted({each.tensor for each in chosen})
    number = {tensor: index for index, tensor in enumerate(tensors)}
    pieces = tuple(
        PieceSpec(number[each.tensor], each.region, place[each.chunk], each.offset)
        for each in chosen
    )
    digest = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((manifest.digest, list(buckets))))
    return msgspec.structs.replace(
        manifest,
        tensors=tuple(manifest.tensors[each] for each in tensors),
        chunk_nbytes=tuple(manifest.chunk_nbytes[each] for each in buckets),
        chunk_digests=tuple(manifest.chunk_digests[each] for each in buckets),
        pieces=pieces,
        digest=digest,
    )
