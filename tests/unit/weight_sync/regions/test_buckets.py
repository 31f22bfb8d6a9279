"""Buckets of a release: their coverage, and whole tensors made of them."""

import msgspec
import numpy as np
import pytest
import torch

from offbeat.messages.weights import WeightRelease
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.weight_sync.buckets import BucketPlan, plan_buckets
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import (
    Bytes,
    Manifest,
    PieceSpec,
    TensorMeta,
    digest_bytes,
    release_digest,
)
from offbeat.weight_sync.receiver import Named, Receiver, TensorRegion
from offbeat.weight_sync.region import Region, chunk_cuts, cut_part
from offbeat.weight_sync.region_tensors import join_release
from offbeat.weight_sync.transaction import Transaction

W = torch.arange(35, dtype=torch.float32).view(7, 5)
META = TensorMeta("w", (7, 5), "float32")


def two_ranks(bucket_bytes: int = 50) -> BucketPlan:
    held = [[("w", cut_part((7, 5), 0, chunk_cuts(7, 2), rank))] for rank in range(2)]
    return plan_buckets([META], held, bucket_bytes)


def packed(plan: BucketPlan) -> tuple[Manifest, str, list[Bytes]]:
    """The release of both ranks, sealed."""
    buckets = dict[int, Bytes]()
    for rank in range(2):
        region = cut_part((7, 5), 0, chunk_cuts(7, 2), rank)
        held = [TensorRegion("w", region, W[region.slices])]
        source = HeldShards(plan, rank, lambda held=held: held)
        for bucket, data, _ in source.pack_buckets(lambda _, nbytes: np.zeros(nbytes, np.uint8)):
            assert isinstance(data, np.ndarray)
            buckets[bucket] = data
    chunks = [buckets[index] for index in range(len(buckets))]
    manifest = plan.manifest.seal([digest_bytes(data) for data in chunks])
    return manifest, release_digest(manifest, manifest.chunk_digests), chunks


def test_whole_tensors_are_made_of_verified_buckets_alone() -> None:
    manifest, digest, buckets = packed(two_ranks())
    release = WeightRelease(1, digest, manifest, (), manifest.nbytes)
    whole = join_release(release, buckets)
    (data,) = whole.chunks
    assert np.array_equal(data.view(np.float32).reshape(7, 5), W.numpy())
    assert whole.digest == release_digest(whole.manifest, whole.manifest.chunk_digests)
    buckets[1] = buckets[1] + np.uint8(1)
    with pytest.raises(TransferRefused, match=r"digest of chunk 1 \(w\["):
        join_release(release, buckets)


def test_a_loader_of_whole_tensors_refuses_regions() -> None:
    class WholeTarget:
        def specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
            return {"w": ((7, 5), "float32")}

        def prepare(self, manifest: Manifest) -> None:
            raise AssertionError(manifest)

        def load(self, tensors: Named) -> None:
            raise AssertionError(tensors)

        def commit(self) -> None: ...

        def rollback(self) -> None: ...

    manifest, *_ = packed(two_ranks())
    with pytest.raises(TransferRefused, match="a chunk is regions of tensors"):
        Receiver(WholeTarget()).begin(1, manifest)


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        ([Region((0, 0), (4, 5))], "20 elements, 0 of them twice"),
        ([Region((0, 0), (4, 5)), Region((3, 0), (7, 5))], "35 elements, 5 of them twice"),
        ([Region((0, 0), (7, 5)), Region((6, 0), (8, 5))], "40 elements, 5 of them twice"),
        ([Region((0, 0), (7, 4)), Region((0, 1), (7, 2))], "28 elements, 7 of them twice"),
    ],
    ids=["a hole", "an overlap", "beyond the tensor", "a hole and an overlap"],
)
def test_regions_that_do_not_cover_a_tensor_once_are_refused_before_the_first_byte(
    regions: list[Region], said: str
) -> None:
    manifest = two_ranks().manifest
    pieces = tuple(PieceSpec(0, region, 0, 0) for region in regions)
    wrong = msgspec.structs.replace(manifest, pieces=pieces)
    transaction = Transaction("g0")
    with pytest.raises(TransferRefused, match="tensor 'w'") as refused:
        transaction.begin(1, wrong, {"w": ((7, 5), "float32")})
    assert said in str(refused.value)


def test_a_bucket_holds_regions_of_the_same_holders_and_is_no_larger_than_it_may_be() -> None:
    for size in (4, 20, 50, 1000):
        plan = two_ranks(size)
        assert max(plan.manifest.chunk_nbytes) <= max(size, 20), "a row is not cut"
        for piece in plan.manifest.pieces:
            holder = 0 if piece.region.stop[0] <= 4 else 1
            assert plan.routes[piece.chunk].holders == (holder,)
