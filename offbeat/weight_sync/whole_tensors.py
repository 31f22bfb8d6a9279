"""Whole tensors out of regions, for engines whose loaders take nothing else."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from offbeat.weight_sync.chunks import BucketMemory, Bytes, digest_of, tensor_views, walk
from offbeat.weight_sync.manifest import Manifest, TensorMeta, plan, release_digest
from offbeat.weight_sync.transaction import Transaction


class WholeRelease(NamedTuple):
    """A release in chunks of whole tensors, as transports without a plan send it."""

    manifest: Manifest
    digest: str
    chunks: tuple[Bytes, ...]


def joined_release(
    manifest: Manifest, digest: str, buckets: Sequence[BucketMemory]
) -> WholeRelease:
    """Copy the regions of buckets into whole tensors; return those as a sealed release.

    Raises:
        TransferRefused: The buckets are not those of the release with this digest, or do not cover
            every tensor once.
    """
    transaction = Transaction("this process", in_place=False)
    transaction.begin(1, manifest, {t.name: (t.shape, t.dtype) for t in manifest.tensors})
    for index, data in enumerate(buckets):
        transaction.arrived(1, index, data.nbytes, digest_of(data))
    transaction.verify(digest)
    metas = (TensorMeta(t.name, t.shape, t.dtype, t.source_dtype) for t in manifest.tensors)
    layout = plan(metas, max(manifest.chunk_nbytes, default=1))
    chunks = list(walk(layout))
    memory = [np.empty(chunk.nbytes, np.uint8) for chunk in chunks]
    places = dict(
        each
        for chunk, data in zip(chunks, memory, strict=True)
        for each in tensor_views(chunk, data)
    )
    pieces = iter(manifest.pieces)  # in the order of the chunks
    with torch.no_grad():
        for bucket, data in zip(walk(manifest), buckets, strict=True):
            for _, values in tensor_views(bucket, data):
                piece = next(pieces)
                name = manifest.tensors[piece.tensor].name
                places[name][piece.region.slices].copy_(values)
    sealed = layout.sealed([digest_of(data) for data in memory])
    sealed = msgspec.structs.replace(sealed, canary=manifest.canary)
    return WholeRelease(sealed, release_digest(sealed, sealed.chunk_digests), tuple(memory))
