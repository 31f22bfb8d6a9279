"""A sync from the ranks of a world to two sharded receivers, in the processes of its first two ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec.msgpack import Decoder
from torch import Tensor

from offbeat.plugins.reshard.messages import ShardRoute, TransferTimeouts
from offbeat.plugins.reshard.receiver import ReshardReceiver
from offbeat.plugins.reshard.sender import ReshardSender
from offbeat.plugins.reshard.server import ReshardServer
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.trainers.ranks.peers import Peers
from offbeat.weight_sync.buckets import NamedRegion, find_needed, plan_buckets
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import Manifest, TensorMeta, release_digest
from offbeat.weight_sync.receiver import Named, Receiver, TensorRegion
from offbeat.weight_sync.region import Placement, Region, chunk_cuts, cut_part
from offbeat.weight_sync.transaction import TensorSpecs
from tests.support.release_parts import part_of_release

BUCKET_BYTES = 3_000
RECEIVERS = 2
TIMEOUTS = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=30.0)


class ShardTarget:
    """One rank of an engine: a region of each tensor, in memory of its own."""

    def __init__(self, metas: Iterable[TensorMeta], regions: Mapping[str, Region]) -> None:
        self._specs = {each.name: (each.shape, each.dtype) for each in metas}
        self._regions = regions
        self.tensors = {
            name: torch.full(regions[name].shape, 7, dtype=getattr(torch, dtype))
            for name, (_, dtype) in self._specs.items()
        }

    def specs(self) -> TensorSpecs:
        return self._specs

    def regions(self) -> Mapping[str, Sequence[Region]]:
        return {name: (region,) for name, region in self._regions.items()}

    def prepare(self, manifest: Manifest) -> None:
        pass

    def load(self, tensors: Named) -> None:
        raise AssertionError(f"{len(tensors)} whole tensors, where regions are expected")

    def load_regions(self, regions: Sequence[TensorRegion]) -> None:
        for name, region, values in regions:
            self.tensors[name][region.within(self._regions[name])].copy_(values)

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass


def parts_of(shape: tuple[int, ...], index: int) -> list[Region]:
    """The regions of both receivers: rows, columns, or everything on both."""
    if len(shape) == 1 and index % 3 == 0:
        return [Region.whole(shape)] * RECEIVERS
    axis = index % len(shape)
    return [
        cut_part(shape, axis, chunk_cuts(shape[axis], RECEIVERS), each) for each in range(RECEIVERS)
    ]


def resharded(
    peers: Peers,
    metas: Iterable[tuple[str, tuple[int, ...], str]],
    held: Sequence[TensorRegion],
    named: Iterable[tuple[str, Tensor]],
    dtype: str | None = None,
) -> tuple[bool, int]:
    """Whether a receiver has, bit for bit, its part of what a broadcast sends; and its bytes."""
    wire, policy = [], WirePolicy(dtype)
    for name, shape, source in metas:
        wire.append(TensorMeta(name, shape, policy(name, source), source))
    world = peers.all_gather(
        [(name, region) for name, region, _ in held], Decoder(list[NamedRegion])
    )
    parts = {each.name: parts_of(each.shape, index) for index, each in enumerate(wire)}
    needed = {name: _placement(regions) for name, regions in parts.items()}
    plan = plan_buckets(wire, world, BUCKET_BYTES, needed)
    server = ReshardServer(host="127.0.0.1", incarnation=f"rank-{peers.rank}", timeouts=TIMEOUTS)
    sender = ReshardSender(HeldShards(plan, peers.rank, lambda: held), server, peers)
    manifest, _, handles, *_ = sender.publish(1)
    route = peers.broadcast(handles[0] if handles else None, Decoder(ShardRoute | None))
    assert route is not None
    whole: dict[str, Any] = dict(named)
    answer = True, 0
    if peers.rank < RECEIVERS:
        mine = {name: regions[peers.rank] for name, regions in parts.items()}
        target = ShardTarget(wire, mine)
        receiver = Receiver(target)
        got = ReshardReceiver("engine", peers.rank).receive(route, 1, manifest)
        part = part_of_release(manifest, find_needed(route.buckets, peers.rank))
        receiver.begin(1, part)
        for index, data in enumerate(got.buckets):
            receiver.apply(1, index, data)
        receiver.verify(release_digest(part, part.chunk_digests))
        receiver.commit(1)
        same = all(
            torch.equal(tensor, whole[name][mine[name].slices].to(tensor.dtype))
            for name, tensor in target.tensors.items()
        )
        answer = same, sum(each.nbytes for each in target.tensors.values())
    peers.all_reduce_max([0])  # nobody leaves before everybody has everything
    sender.close()
    return answer


def _placement(regions: list[Region]) -> Placement:
    if len(set(regions)) == 1:
        return Placement(((regions[0], tuple(range(RECEIVERS))),))
    return Placement(tuple((region, (rank,)) for rank, region in enumerate(regions)))
