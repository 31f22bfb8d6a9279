"""Plans the buckets of a reshard: their regions, holders and receivers. Pure.

A bucket is sent as one message. It is a chunk of the manifest that holds regions of tensors. All
regions in a bucket have the same holders and the same senders. So each rank packs each of its
buckets once. Any holder can replace another as sender, because all holders agree on the digest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import xxhash

from offbeat.weight_sync.dtypes import ITEMSIZE
from offbeat.weight_sync.errors import ReplicasDiverged, WeightsNotCovered
from offbeat.weight_sync.manifest import (
    ALIGNMENT,
    Manifest,
    PieceSpec,
    TensorMeta,
    TensorSpec,
)
from offbeat.weight_sync.region import PlacedTensor, Placement, Ranks, Region, Shape, union_elements
from offbeat.weight_sync.transfer_plan import RankMachines, TransferPlan, plan_transfers

NamedRegion = tuple[str, Region]


class BucketRoute(msgspec.Struct, frozen=True, array_like=True):
    """Ranks that hold a bucket, and its sender for each receiver."""

    holders: Ranks
    sender_by_receiver: tuple[tuple[int, int], ...]  # (receiver, sender)


class BucketPlan(msgspec.Struct, frozen=True):
    """Layout of a release in buckets. It is the same on every rank."""

    manifest: Manifest  # without a seal
    routes: tuple[BucketRoute, ...]  # by bucket

    def held_by(self, rank: int) -> list[int]:
        """Return the buckets that a source rank packs."""
        return [index for index, route in enumerate(self.routes) if rank in route.holders]


def find_needed(routes: Sequence[BucketRoute], receiver: int) -> list[int]:
    """Return the indices of the buckets that a receiver needs."""
    return [
        index
        for index, route in enumerate(routes)
        if any(each == receiver for each, _ in route.sender_by_receiver)
    ]


def collect_placements(held: Sequence[Sequence[NamedRegion]]) -> dict[str, Placement]:
    """Return the placement of every tensor, from the regions that each rank holds."""
    ranks_of = dict[str, dict[Region, list[int]]]()
    for rank, regions in enumerate(held):
        for name, region in dict.fromkeys(regions):
            if region.elements:
                ranks_of.setdefault(name, {}).setdefault(region, []).append(rank)
    alike = dict[tuple[tuple[Region, Ranks], ...], Placement]()
    found = dict[str, Placement]()
    for name, parts in ranks_of.items():
        key = tuple((region, tuple(ranks)) for region, ranks in parts.items())
        found[name] = alike.setdefault(key, Placement(key))
    return found


def whole_on_one(shapes: Iterable[Shape]) -> dict[Shape, Placement]:
    """Return the placements for one receiver that needs whole tensors, by shape."""
    return {shape: Placement(((Region.whole(shape), (0,)),)) for shape in shapes}


def plan_buckets(
    tensors: Sequence[TensorMeta],
    held: Sequence[Sequence[NamedRegion]],
    bucket_bytes: int,
    needed: Mapping[str, Placement] | None = None,
) -> BucketPlan:
    """Plan which buckets each rank sends.

    Args:
        tensors: Every tensor of the release, in wire dtypes.
        held: Regions that each source rank holds.
        bucket_bytes: Maximum size of a bucket. A single row that is larger forms a separate bucket.
        needed: Placement of each tensor on the receivers, or None if a single receiver needs
            everything.

    Raises:
        WeightsNotCovered: The ranks hold only a part of a tensor, or nothing.
        PlanHasHole: A receiver needs a region that no rank holds.
    """
    sources = collect_placements(held)
    for each in tensors:
        regions = [region for region, _ in sources[each.name].parts] if each.name in sources else []
        missing = Region.whole(each.shape).elements - union_elements(regions)
        if missing:
            raise WeightsNotCovered(each.name, missing, len(held))
    whole = whole_on_one({each.shape for each in tensors})
    nothing = Placement(())
    placed = [
        PlacedTensor(
            each.name,
            each.shape,
            ITEMSIZE[each.dtype],
            sources.get(each.name, nothing),
            whole[each.shape] if needed is None else needed[each.name],
        )
        for each in tensors
        if Region.whole(each.shape).elements
    ]
    receivers = 1 + max(
        (rank for each in placed for _, ranks in each.target.parts for rank in ranks), default=0
    )
    machines = RankMachines.of_size(len(held), receivers, 1)
    plan = plan_transfers(placed, machines, max_piece_bytes=bucket_bytes)
    return _pack(tensors, plan, bucket_bytes)


def _pack(tensors: Sequence[TensorMeta], plan: TransferPlan, bucket_bytes: int) -> BucketPlan:
    senders = dict[tuple[int, Region], list[tuple[int, int]]]()
    for piece, sender, receiver, _ in plan.transfers():
        senders.setdefault((piece.tensor, piece.region), []).append((receiver, sender))
    number = {each.name: index for index, each in enumerate(tensors)}
    open_, ends = dict[BucketRoute, int](), list[int]()
    routes, pieces = list[BucketRoute](), list[PieceSpec]()
    for piece in plan.pieces:
        tensor = plan.tensors[piece.tensor]
        route = BucketRoute(
            _holders(tensor.source, piece.region),
            tuple(sorted(senders[piece.tensor, piece.region])),
        )
        bucket = open_.get(route)
        start = 0 if bucket is None else -(-ends[bucket] // ALIGNMENT) * ALIGNMENT
        if bucket is None or start + piece.nbytes > bucket_bytes:
            bucket, start = len(ends), 0
            open_[route] = bucket
            ends.append(0)
            routes.append(route)
        pieces.append(PieceSpec(number[tensor.name], piece.region, bucket, start))
        ends[bucket] = start + piece.nbytes
    pieces.sort(key=lambda each: (each.chunk, each.offset))
    specs = tuple(TensorSpec(t.name, t.shape, t.dtype, -1, 0, t.source_dtype) for t in tensors)
    digest = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((specs, ends, pieces, routes)))
    manifest = Manifest(specs, tuple(ends), digest, pieces=tuple(pieces))
    return BucketPlan(manifest, tuple(routes))


def _holders(source: Placement, region: Region) -> Ranks:
    ranks = {rank for held, ranks in source.parts if held.contains(region) for rank in ranks}
    return tuple(sorted(ranks))


def agree_on_digests(
    by_rank: Sequence[Mapping[int, str]], names: Callable[[int], str]
) -> tuple[str, ...]:
    """Return the digest of every bucket after checking that all its holders agree.

    Args:
        by_rank: Digests of the buckets that each rank holds, by bucket.
        names: Returns the names of a bucket's tensors for the error.

    Raises:
        ReplicasDiverged: Two ranks hold different values of the same weights.
    """
    found = dict[int, tuple[int, str]]()
    for rank, digests in enumerate(by_rank):
        for bucket, digest in digests.items():
            first, known = found.setdefault(bucket, (rank, digest))
            if digest != known:
                raise ReplicasDiverged(names(bucket), (first, rank), (known, digest))
    return tuple(found[bucket][1] for bucket in range(len(found)))
