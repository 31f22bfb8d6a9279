"""Builds whole tensors for an engine's loader from only the regions that it reads."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.chunks import BucketMemory, tensor_views, walk
from offbeat.weight_sync.manifest import Manifest, TensorMeta, digest_bytes, plan, release_digest
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.transaction import Transaction


class RegionTensors:
    """Puts the regions of some buckets into their places in tensors of the whole shape.

    Memory outside these regions must not be read. A recording proves that the loader does not read
    it. The operating system allocates only pages that are written. So a tensor that is cut by rows
    needs little more memory than its regions.
    """

    def __init__(self, manifest: Manifest, buckets: Sequence[int]) -> None:
        """Lay out the release. Memory is allocated only in ``tensors``."""
        place = {bucket: index for index, bucket in enumerate(buckets)}
        self._specs = manifest.tensors
        self._chunks = [each for each in walk(manifest) if each.index in place]
        self._places = [place[each.index] for each in self._chunks]
        self._pieces: list[list[tuple[int, Region]]] = [[] for _ in self._chunks]
        at = {bucket.index: index for index, bucket in enumerate(self._chunks)}
        for piece in manifest.pieces:
            if piece.chunk in at:
                self._pieces[at[piece.chunk]].append((piece.tensor, piece.region))
        self._groups = find_groups(manifest)

    def tensors(self, arrived: Sequence[BucketMemory]) -> list[Iterator[tuple[str, Tensor]]]:
        """Return an iterator over each group's named tensors, which creates them lazily.

        A tensor without any received region is left out. A tensor that arrived as a single region
        is a view of its bucket, which must not change while the tensor is in use.

        Args:
            arrived: The buckets, in the order of ``__init__``.
        """
        found = dict[int, list[tuple[Region, Tensor]]]()
        for chunk, place, pieces in zip(self._chunks, self._places, self._pieces, strict=True):
            views = tensor_views(chunk, arrived[place])
            for (tensor, region), (_, values) in zip(pieces, views, strict=True):
                found.setdefault(tensor, []).append((region, values))
        return [self._group(group, found) for group in self._groups]

    def _group(
        self, group: Sequence[int], found: Mapping[int, list[tuple[Region, Tensor]]]
    ) -> Iterator[tuple[str, Tensor]]:
        for index in group:
            if parts := found.get(index):
                yield self._specs[index].name, _join(self._specs[index].shape, parts)


def group_tensors(manifest: Manifest) -> Manifest:
    """Return a release's tensors in chunks of about a bucket's size, the same for every rank."""
    metas = (TensorMeta(each.name, each.shape, each.dtype) for each in manifest.tensors)
    return plan(metas, max(manifest.chunk_nbytes, default=1))


def find_groups(manifest: Manifest) -> list[list[int]]:
    """Return the indices of the tensors in each chunk of ``group_tensors``."""
    layout = group_tensors(manifest)
    groups: list[list[int]] = [[] for _ in layout.chunk_nbytes]
    for index, spec in enumerate(layout.tensors):
        groups[spec.chunk].append(index)
    return groups


def _join(shape: tuple[int, ...], parts: Sequence[tuple[Region, Tensor]]) -> Tensor:
    (region, values), *others = parts
    if not others and region == Region.whole(shape):
        return values
    whole = torch.empty(shape, dtype=values.dtype, device=values.device)
    for region, values in parts:
        whole[region.slices] = values
    return whole


def join_release(release: WeightRelease, buckets: Sequence[BucketMemory]) -> WeightRelease:
    """Copy the regions of buckets into whole tensors and return them as a sealed release.

    Raises:
        TransferRefused: The buckets do not match the release's digest, or do not cover every tensor
            exactly once.
    """
    manifest, transaction = release.manifest, Transaction("this process")
    transaction.begin(1, manifest, {t.name: (t.shape, t.dtype) for t in manifest.tensors})
    for index, data in enumerate(buckets):
        transaction.arrived(1, index, data.nbytes, digest_bytes(data))
    transaction.verify(release.digest)
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
    sealed = layout.seal([digest_bytes(data) for data in memory])
    sealed = msgspec.structs.replace(sealed, canary=manifest.canary)
    digest = release_digest(sealed, sealed.chunk_digests)
    return msgspec.structs.replace(release, digest=digest, manifest=sealed, chunks=tuple(memory))
