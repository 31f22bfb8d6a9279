"""Source ranks and receivers of a reshard in one process, and ways to break them."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from bench_parts import HOST, PATIENT, together
from msgspec.msgpack import Decoder
from torch import nn

from offbeat.plugins.reshard.messages import TransferTimeouts
from offbeat.plugins.reshard.receiver import (
    OnBucket,
    ReceivedBuckets,
    ReshardReceiver,
)
from offbeat.plugins.reshard.sender import ReshardSender
from offbeat.plugins.reshard.server import OfferedRelease, ReshardServer
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.weight_sync.buckets import NamedRegion, plan_buckets
from offbeat.weight_sync.chunks import BucketMemory, dtype_name, iterate_weights
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.receiver import Receiver, TensorRegion
from offbeat.weight_sync.region import Region, chunk_cuts, cut_part
from offbeat.weight_sync.transport import PublishedRelease
from tests.support.plain_modules import ModuleReceiver
from tests.support.weight_models import Model, equal, weights
from tests.support.wire_doubles import doubled

TCP, HANDLES, GROUPS = "tcp", "cuda_ipc", "nccl"
T = TypeVar("T")
BUCKET_BYTES = 100
Held = Callable[[str, tuple[int, ...], int], list[Region]]
"""(name, shape, rank) -> regions that the rank holds."""


class ThreadPeers:
    """Ranks that are threads of one process."""

    timeout_s = 1800.0

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._values = rank, barrier.parties, barrier, values

    def all_gather(self, value: T, decoder: Decoder[T]) -> list[T]:
        del decoder
        self._values[self.rank] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        return [max(each) for each in zip(*self.all_gather(list(values), Decoder()), strict=True)]

    def broadcast(self, value: T, decoder: Decoder[T]) -> T:
        return self.all_gather(value, decoder)[0]

    def are_lost(self, error: Exception) -> bool:
        del error
        return False


def rows_of(ranks: int) -> Held:
    """FSDP's chunks of the first axis; some ranks hold none of a short tensor."""

    def held(name: str, shape: tuple[int, ...], rank: int) -> list[Region]:
        del name
        return [cut_part(shape, 0, chunk_cuts(shape[0], ranks), rank)]

    return held


def copied(held: Held, ranks: int) -> Held:
    """Two copies of a layout over so many ranks."""
    return lambda name, shape, rank: held(name, shape, rank % ranks)


@dataclass
class Buckets(Mapping[int, BucketMemory]):
    """The buckets of a snapshot; ``strike`` is called before one of them is sent."""

    buckets: Mapping[int, BucketMemory]
    strike: Callable[[int], BucketMemory | None]

    def __getitem__(self, bucket: int) -> BucketMemory:
        struck = self.strike(bucket)
        return self.buckets[bucket] if struck is None else struck

    def __contains__(self, bucket: object) -> bool:
        return bucket in self.buckets

    def __iter__(self) -> Iterator[int]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)


def struck(offered: OfferedRelease, strike: Callable[[int], BucketMemory | None]) -> OfferedRelease:
    """A release whose buckets, and changes of them, are sent through ``strike``."""
    changes = None if offered.changes is None else struck(offered.changes, strike)
    return replace(offered, buckets=Buckets(offered.buckets, strike), changes=changes)


class ReshardBench:
    """One model over several source ranks."""

    def __init__(
        self,
        ranks: int = 2,
        held: Held | None = None,
        *,
        seed: int = 1,
        models: Sequence[nn.Module] = (),
        bucket_bytes: int = BUCKET_BYTES,
        timeouts: TransferTimeouts = PATIENT,
        incarnation: str = "incarnation-1",
        wire: str = "tcp",
        delta: bool = False,
    ) -> None:
        held = held or rows_of(ranks)
        self.models: Sequence[Any] = models or [Model(seed) for _ in range(ranks)]
        metas = [
            TensorMeta(name, tuple(each.shape), dtype_name(each))
            for name, each in iterate_weights(self.models[0])
        ]

        def regions(rank: int) -> list[TensorRegion]:
            return [
                TensorRegion(name, region, each[region.slices])
                for name, each in iterate_weights(self.models[rank])
                for region in held(name, tuple(each.shape), rank)
            ]

        named: list[list[NamedRegion]] = [
            [(each.name, each.region) for each in regions(rank)] for rank in range(ranks)
        ]
        self.plan = plan_buckets(metas, named, bucket_bytes)
        larger = plan_buckets(metas, named, 3 * bucket_bytes)
        self.next_plans = [larger] * ranks  # of each rank, for whichever layout is followed
        self.servers = [
            ReshardServer(
                host=HOST,
                incarnation=f"{incarnation}.{rank}",
                timeouts=timeouts,
                wire=doubled(wire, f"GPU-of-rank-{rank}"),
            )
            for rank in range(ranks)
        ]
        self.senders: list[ReshardSender] = [None] * ranks  # type: ignore[list-item]
        barrier, values = threading.Barrier(ranks, timeout=10.0), [None] * ranks

        def start(rank: int) -> None:
            source = HeldShards(
                self.plan, rank, lambda: regions(rank), lambda _: self.next_plans[rank]
            )
            peers = ThreadPeers(rank, barrier, values)
            self.senders[rank] = ReshardSender(source, self.servers[rank], peers, delta=delta)

        together(*(lambda rank=rank: start(rank) for rank in range(ranks)))
        self.count = len(self.plan.routes)
        self._layout: EngineLayout | None = None

    def publish(self, version: int) -> PublishedRelease:
        """The release of all ranks; raises what a rank has raised."""
        answers: list[Any] = [None] * len(self.senders)
        layout, self._layout = self._layout, None

        def work(rank: int) -> None:
            try:
                answers[rank] = self.senders[rank].publish(version, layout)
            except Exception as error:  # noqa: BLE001 -- raised below
                answers[rank] = error

        together(*(lambda rank=rank: work(rank) for rank in range(len(self.senders))))
        for each in answers:
            if isinstance(each, Exception):
                raise each
        return answers[0]

    def follow(self, layout: EngineLayout) -> None:
        """Every rank cuts larger buckets from the next release on."""
        self._layout = layout

    def train(self) -> None:
        """Every rank's copy of the weights changes, by the same."""
        for model in self.models:
            for _, each in iterate_weights(model):
                each.add_(1)

    def struck(self, rank: int, strike: Callable[[int], BucketMemory | None]) -> None:
        """Send the offered buckets of a rank, and their changes, through ``strike``."""
        offered = self.servers[rank].offered
        assert offered is not None
        self.servers[rank].offer(struck(offered, strike))

    def close(self) -> None:
        for each in self.senders:
            each.close()


@dataclass
class ReshardEnd:
    """A receiver and what became of its last transfer."""

    name: str
    receiver: Receiver
    transport: ReshardReceiver = field(init=False)
    outcome: ReceivedBuckets | Exception | None = None

    def __post_init__(self) -> None:
        self.transport = ReshardReceiver(self.name, device="GPU-of-an-engine", wires=doubled)

    def take(
        self,
        published: PublishedRelease,
        epoch: int,
        on_bucket: OnBucket | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """One transfer, as an engine does it; never raises."""
        manifest, digest, (route,), *_ = published
        try:
            got = self.transport.receive(route, epoch, manifest, given_up, on_bucket)
            self.receiver.begin(epoch, manifest)
            for index, data in enumerate(got.buckets):
                self.receiver.apply(epoch, index, data)
            self.receiver.verify(digest)
            self.receiver.commit(epoch)
            self.outcome = got
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            self.outcome = error
            self.receiver.abort()


def reshard_end(name: str, model: nn.Module) -> ReshardEnd:
    return ReshardEnd(name, ModuleReceiver(model, name))


def serves(model: nn.Module, bench: ReshardBench) -> bool:
    """Whether a receiver has exactly the trainer's weights."""
    return equal(weights(model), weights(bench.models[0]))


def damaged(bench: ReshardBench, sender: int, bucket: int) -> BucketMemory:
    """A bucket as its sender has packed it, but for one bit."""
    server = bench.servers[sender]
    offered = server.offered
    assert offered is not None
    data = offered.buckets[bucket]
    copy: Any = server.wire.memory_to_send(data.nbytes)
    copy[:] = data
    copy[0] ^= 1
    return copy
