"""Syncs of several ranks to several engines under drawn faults: no engine ever serves a mixture.

Plans, packing, digests, fetches and transactions are the real ones; connections and time are not, so
that a fault can fall between any two buckets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reshard_bench import copied, rows_of

from offbeat.plugins.reshard.fetch import BucketFetch
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.weight_sync.buckets import plan_buckets
from offbeat.weight_sync.chunks import dtype_name, iterate_weights
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest, TensorMeta, digest_bytes, release_digest
from offbeat.weight_sync.receiver import TensorRegion
from tests.support.plain_modules import ModuleReceiver
from tests.support.weight_models import Model, equal, weights

FAULTS: tuple[str, ...] = (
    "dies",
    "sends wrong bytes",
    "sends a bucket twice",
    "sends the former release",
)


@dataclass
class SimulatedTrainer:
    """Ranks with one model, which trains between releases and while they are sent."""

    ranks: int
    copies: int
    version: int = 0
    model: Model = field(default_factory=lambda: Model(1))
    buckets: dict[int, dict[int, Bytes]] = field(default_factory=dict)  # by rank; the snapshot
    former: dict[int, dict[int, Bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = copied(rows_of(self.ranks), self.ranks)
        metas = [
            TensorMeta(name, tuple(each.shape), dtype_name(each))
            for name, each in iterate_weights(self.model)
        ]
        self.world = self.ranks * self.copies
        named = [[(e.name, e.region) for e in self.regions(r)] for r in range(self.world)]
        self.plan = plan_buckets(metas, named, 100)

    def regions(self, rank: int) -> list[TensorRegion]:
        return [
            TensorRegion(name, region, each[region.slices])
            for name, each in iterate_weights(self.model)
            for region in self.held(name, tuple(each.shape), rank)
        ]

    def publish(self) -> tuple[Manifest, str]:
        self.version += 1
        for _, each in iterate_weights(self.model):
            each.add_(self.version)
        self.former, self.buckets, digests = self.buckets, {}, dict[int, str]()
        for rank in range(self.world):
            source = HeldShards(self.plan, rank, lambda rank=rank: self.regions(rank))
            packed = list(source.pack_buckets(lambda _, nbytes: np.zeros(nbytes, np.uint8)))
            self.buckets[rank] = {
                each.bucket: each.data for each in packed if isinstance(each.data, np.ndarray)
            }
            digests |= {each.bucket: each.digest for each in packed}
        manifest = self.plan.manifest.seal([digests[each] for each in range(len(digests))])
        return manifest, release_digest(manifest, manifest.chunk_digests)


def fetched(
    trainer: SimulatedTrainer,
    manifest: Manifest,
    faults: Mapping[int, tuple[str, int]],
    first: int,
) -> dict[int, Bytes] | None:
    """What arrives of a release when ranks fail as drawn; None: a bucket has no holder left."""
    fetch = BucketFetch(trainer.plan.routes, manifest.chunk_nbytes, first=first)
    got = dict[int, Bytes]()
    while (task := fetch.next()) is not None:
        sender, buckets = task
        kind, at = faults.get(sender, ("", -1))
        for count, bucket in enumerate(buckets):
            data = trainer.buckets[sender][bucket]
            if count == at and kind == "dies":
                fetch.fail(sender, kind)
                break
            if count == at and kind == "sends wrong bytes":
                data = data ^ np.uint8(1)
            if count == at and kind == "sends the former release":
                data = trainer.former.get(sender, trainer.buckets[sender])[bucket]
            if digest_bytes(data) != manifest.chunk_digests[bucket]:
                fetch.fail(sender, "wrong")
                break
            for _ in range(2 if (count, kind) == (at, "sends a bucket twice") else 1):
                if fetch.took(sender, bucket):
                    got[bucket] = data
        else:
            fetch.ended(sender)
    return None if fetch.lost else got


@given(st.data())
def test_an_engine_serves_the_release_that_it_says_or_the_one_before(data: st.DataObject) -> None:
    trainer = SimulatedTrainer(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)))
    engines = [Model(10 + index) for index in range(data.draw(st.integers(1, 2)))]
    receivers = [ModuleReceiver(model, f"g{i}") for i, model in enumerate(engines)]
    served = [weights(model) for model in engines]
    rank, at = st.integers(0, trainer.world - 1), st.integers(0, 5)
    syncs = data.draw(st.integers(1, 2))
    for epoch in range(1, syncs + 2):
        manifest, digest = trainer.publish()
        truth = weights(trainer.model)
        is_last = epoch == syncs + 1
        for index, receiver in enumerate(receivers):
            drawn = st.dictionaries(rank, st.tuples(st.sampled_from(FAULTS), at))
            faults = {} if is_last else data.draw(drawn)
            stops_at = (
                -1 if is_last else data.draw(st.integers(-4, trainer.plan.manifest.nbytes % 7))
            )
            got = fetched(trainer, manifest, faults, index)
            if got is None:
                assert equal(weights(engines[index]), served[index])
                continue
            receiver.begin(epoch, manifest)
            for bucket in range(len(got)):
                if bucket == stops_at:  # the engine is stopped, or its call is given up
                    receiver.abort()
                    break
                receiver.apply(epoch, bucket, got[bucket])
            else:
                receiver.verify(digest)
                receiver.commit(epoch)
                served[index] = truth
            assert equal(weights(engines[index]), served[index])
    assert all(equal(weights(model), truth) for model in engines), "a whole sync heals"


def test_a_receiver_that_did_not_compare_digests_would_be_seen() -> None:
    """Its release would be refused as a whole."""
    trainer, model = SimulatedTrainer(2, 1), Model(9)
    manifest, digest = trainer.publish()
    got = fetched(trainer, manifest, {}, 0)
    assert got is not None
    receiver = ModuleReceiver(model)
    receiver.begin(1, manifest)
    refused = False
    try:
        for bucket in range(len(got)):
            receiver.apply(1, bucket, got[bucket] ^ np.uint8(bucket == 1))
        receiver.verify(digest)
    except TransferRefused:
        refused = True
    assert refused
