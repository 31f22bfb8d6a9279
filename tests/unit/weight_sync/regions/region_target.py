"""A release that several senders pack from regions of tensors, and a receiver that keeps regions of it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.weight_sync.buckets import BucketPlan, agree_on_digests
from offbeat.weight_sync.manifest import Bytes, Manifest, TensorMeta, digest_bytes, release_digest
from offbeat.weight_sync.receiver import Named, Receiver, TensorRegion
from offbeat.weight_sync.region import Region
from tests.support.release_parts import part_of_release

UNREAD = -1.0
"""What a receiver has where nothing was sent; no weight is negative."""


def metas(tensors: Mapping[str, Tensor]) -> list[TensorMeta]:
    return [TensorMeta(name, tuple(each.shape), "float32") for name, each in tensors.items()]


def packed(
    plan: BucketPlan, shards: Sequence[Sequence[TensorRegion]]
) -> tuple[Manifest, dict[int, Bytes]]:
    """The sealed release that the senders make of what each holds, and its chunks by bucket.

    Raises:
        ReplicasDiverged: Two of them hold a bucket with other values.
    """

    def names(bucket: int) -> str:
        pieces = [each for each in plan.manifest.pieces if each.chunk == bucket]
        return ", ".join(plan.manifest.tensors[each.tensor].name for each in pieces)

    chunks, digests = dict[int, Bytes](), list[dict[int, str]]()
    for rank, held in enumerate(shards):
        sender = HeldShards(plan, rank, lambda held=held: held)
        digests.append({})
        for bucket, data, digest in sender.pack_buckets(
            lambda _, nbytes: np.empty(nbytes, np.uint8)
        ):
            assert isinstance(data, np.ndarray)  # the memory that it was given
            assert digest_bytes(data) == digest
            chunks[bucket], digests[-1][bucket] = data, digest
    return plan.manifest.seal(agree_on_digests(digests, names)), chunks


class RegionTarget:
    """Regions of tensors, as a receiver keeps them; everything else is ``UNREAD``."""

    def __init__(
        self, tensors: Mapping[str, Tensor], needs: Mapping[str, Sequence[Region]]
    ) -> None:
        """``tensors``: whole, of which only shapes are read; ``needs``: regions of each."""
        self._needs = needs
        self.tensors = {name: torch.full_like(each, UNREAD) for name, each in tensors.items()}

    def specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        held = [each for each in metas(self.tensors) if self._needs[each.name]]
        return {each.name: (each.shape, each.dtype) for each in held}

    def regions(self) -> Mapping[str, Sequence[Region]]:
        return self._needs

    def prepare(self, manifest: Manifest) -> None: ...

    def load(self, tensors: Named) -> None:
        raise AssertionError(tensors)

    def load_regions(self, regions: Sequence[TensorRegion]) -> None:
        for name, region, values in regions:
            self.tensors[name][region.slices] = values

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


def receive(
    target: RegionTarget, manifest: Manifest, chunks: Mapping[int, Bytes], buckets: Sequence[int]
) -> Manifest:
    """Fill a target with some buckets of a release; return what these are of it."""
    part, receiver = part_of_release(manifest, buckets), Receiver(target)
    receiver.begin(1, part)
    for index, bucket in enumerate(buckets):
        receiver.apply(1, index, chunks[bucket])
    receiver.verify(release_digest(part, part.chunk_digests))
    receiver.commit(1)
    return part
