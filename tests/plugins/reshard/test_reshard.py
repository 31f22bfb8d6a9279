"""The reshard over real connections: source ranks and receivers in threads of one process."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from bench_parts import HASTY, names, together
from reshard_bench import (
    GROUPS,
    HANDLES,
    TCP,
    Held,
    ReshardBench,
    ReshardEnd,
    ThreadPeers,
    copied,
    damaged,
    reshard_end,
    rows_of,
    serves,
)

from offbeat.plugins.reshard.receiver import ReceivedBuckets
from offbeat.plugins.reshard.sender import ReshardSender
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.weight_sync.buckets import plan_buckets
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.errors import (
    PlansDiffer,
    ReplicasDiverged,
    SenderGone,
    TransferFailed,
    WeightsNotCovered,
)
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.object_store import ObjectStoreSender
from offbeat.weight_sync.region import Region
from tests.support.plain_modules import ModuleSource
from tests.support.weight_models import Model, equal, weights

LAYOUTS: dict[str, tuple[int, Held]] = {
    "one rank": (1, rows_of(1)),
    "two shards": (2, rows_of(2)),
    "four shards, some empty": (4, rows_of(4)),
    "two copies of two shards": (4, copied(rows_of(2), 2)),
    "three copies": (3, copied(rows_of(1), 1)),
}
Made = Callable[..., ReshardBench]


@pytest.fixture(params=[TCP, HANDLES, pytest.param(GROUPS, marks=pytest.mark.long)])
def bench_of(request: pytest.FixtureRequest) -> Iterator[Made]:
    """Benches over each wire, those of devices with what stands in for CUDA."""
    made = list[ReshardBench]()

    def make(layout: str = "two shards", **options: object) -> ReshardBench:
        ranks, held = LAYOUTS[layout]
        made.append(ReshardBench(ranks, held, wire=request.param, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def ends(count: int) -> tuple[list[Model], list[ReshardEnd]]:
    models = [Model(10 + index) for index in range(count)]
    return models, [
        reshard_end(name, model) for name, model in zip(names(count), models, strict=True)
    ]


def heals(models: list[Model], receivers: list[ReshardEnd], bench: ReshardBench) -> None:
    """Whatever came of earlier ones, a whole transfer is exact."""
    published = bench.publish(9)
    together(*(partial(each.take, published, 99) for each in receivers))
    assert all(serves(model, bench) for model in models)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_engine_gets_the_weights_of_a_broadcast_from_any_layout(
    bench_of: Made, layout: str
) -> None:
    bench, (models, receivers) = bench_of(layout), ends(2)
    for epoch in (1, 2):
        published = bench.publish(epoch)
        together(*(partial(each.take, published, epoch) for each in receivers))
        assert all(isinstance(each.outcome, ReceivedBuckets) for each in receivers)
        whole = ObjectStoreSender(ModuleSource(bench.models[0], 200)).publish(epoch)
        like = reshard_end("broadcast", Model(4)).receiver
        like.begin(epoch, whole.manifest)
        for index, chunk in enumerate(whole.handles):
            like.apply(epoch, index, chunk)
        like.verify(whole.digest)
        assert all(serves(model, bench) for model in models)
        bench.train()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_needed_byte_is_sent_once_and_copies_share_the_sending(
    bench_of: Made, layout: str
) -> None:
    bench = bench_of(layout)
    manifest, sent = bench.plan.manifest, [0] * len(bench.senders)
    for route, nbytes in zip(bench.plan.routes, manifest.chunk_nbytes, strict=True):
        ((_, sender),) = route.sender_by_receiver
        assert sender in route.holders
        sent[sender] += nbytes
    content = sum(weight.nbytes for weight in weights(bench.models[0]).values())
    assert sum(piece.region.elements for piece in manifest.pieces) == sum(
        weight.numel() for weight in weights(bench.models[0]).values()
    )
    assert content <= sum(sent) <= content + 64 * len(manifest.pieces)


def test_a_release_is_a_snapshot_of_every_rank(bench_of: Made) -> None:
    bench, ((model,), (receiver,)) = bench_of("four shards, some empty"), ends(1)
    published, before = bench.publish(1), weights(bench.models[0])
    bench.train()
    receiver.take(published, 1)
    assert equal(weights(model), before)


def test_an_engine_that_comes_later_takes_the_same_release_alone(bench_of: Made) -> None:
    bench, (models, (first, second)) = bench_of(), ends(2)
    published = bench.publish(1)
    first.take(published, 1)
    second.take(published, 2)
    assert all(serves(model, bench) for model in models)


@pytest.mark.parametrize("layout", ["two shards", "two copies of two shards"])
def test_at_every_bucket_a_rank_that_fails_is_replaced_by_its_copies_or_named(
    bench_of: Made, layout: str
) -> None:
    bench, (models, receivers) = bench_of(layout, timeouts=HASTY), ends(1)
    before, copies = weights(models[0]), layout != "two shards"
    for epoch, bucket in enumerate(range(bench.count), start=1):
        published = bench.publish(epoch)
        ((_, sender),) = bench.plan.routes[bucket].sender_by_receiver

        def strike(index: int, at: int = bucket) -> None:
            if index == at:
                raise OSError("disk on fire")

        bench.struck(sender, strike)
        receivers[0].take(published, epoch)
        if copies:
            outcome = receivers[0].outcome
            assert isinstance(outcome, ReceivedBuckets), outcome
            assert list(outcome.failed) == [sender]
            assert outcome.resent >= 1
            assert serves(models[0], bench)
        else:
            assert isinstance(receivers[0].outcome, TransferFailed)
            assert f"sender rank {sender}: " in str(receivers[0].outcome)
            assert "no other rank holds bucket" in str(receivers[0].outcome)
            assert equal(weights(models[0]), before), "it serves what it served"
    heals(models, receivers, bench)


def test_at_every_bucket_an_engine_that_raises_costs_the_others_nothing(bench_of: Made) -> None:
    bench, (models, (bad, good)) = bench_of(), ends(2)
    for epoch in range(1, bench.count + 1):
        published, arrived = bench.publish(epoch), list[int]()

        def on_bucket(
            index: int, data: BucketMemory, at: int = epoch, arrived: list[int] = arrived
        ) -> None:
            del data
            arrived.append(index)
            if len(arrived) == at:
                raise ValueError("out of memory")

        together(
            partial(bad.take, published, epoch, on_bucket), partial(good.take, published, epoch)
        )
        assert isinstance(bad.outcome, ValueError)
        assert isinstance(good.outcome, ReceivedBuckets)
        assert serves(models[1], bench)
        bench.train()
    heals(models, [bad, good], bench)


@pytest.mark.parametrize("layout", ["two shards", "two copies of two shards"])
def test_a_wrong_bucket_reaches_no_parameter_and_a_copy_sends_it_right(
    bench_of: Made, layout: str
) -> None:
    bench, (models, receivers) = bench_of(layout), ends(1)
    before, published = weights(models[0]), bench.publish(1)
    ((_, sender),) = bench.plan.routes[1].sender_by_receiver
    wrong = damaged(bench, sender, 1)
    bench.struck(sender, lambda index: wrong if index == 1 else None)
    receivers[0].take(published, 1)
    outcome = receivers[0].outcome
    if isinstance(outcome, ReceivedBuckets):
        assert "sent bucket 1 (" in outcome.failed[sender]
        assert serves(models[0], bench)
    else:
        assert layout == "two shards"
        assert f"sender rank {sender} sent bucket 1 (" in str(outcome)
        assert equal(weights(models[0]), before)
    heals(models, receivers, bench)


def test_a_rank_of_another_process_release_or_plan_refuses_by_name(bench_of: Made) -> None:
    bench, (models, (receiver,)) = bench_of(), ends(1)
    manifest, digest, (route,), *_ = published = bench.publish(1)
    bench.publish(2)
    changed = bench.models[0]
    before = weights(models[0])
    foreign = msgspec.structs.replace(route.senders[1], incarnation="incarnation-0.1")
    for given, why in (
        (
            msgspec.structs.replace(route, senders=(route.senders[0], foreign)),
            "has taken its place",
        ),
        (msgspec.structs.replace(route, digest="0" * 32), "now holds a different release"),
    ):
        receiver.take(published._replace(handles=(given,)), 1)
        assert why in str(receiver.outcome)
        assert isinstance(receiver.outcome, SenderGone)
    other = msgspec.structs.replace(manifest, digest="f" * 32)
    receiver.take(published._replace(manifest=other), 3)
    assert "follows a different plan" in str(receiver.outcome)
    assert type(receiver.outcome) is TransferFailed, "no sender has ended"
    assert equal(weights(models[0]), before)
    assert changed is bench.models[0]
    assert digest
    heals(models, [receiver], bench)


def test_a_transfer_that_nobody_waits_for_stops_at_the_next_bucket(bench_of: Made) -> None:
    bench, (models, (receiver,)) = bench_of(), ends(1)
    given_up, published, seen = threading.Event(), bench.publish(1), list[int]()

    def on_bucket(index: int, data: BucketMemory) -> None:
        del data
        seen.append(index)
        given_up.set()

    receiver.take(published, 1, on_bucket, given_up)
    assert "nobody waits for it any more" in str(receiver.outcome)
    assert len(seen) == 1
    heals(models, [receiver], bench)


def test_copies_that_have_diverged_are_named_before_anything_is_published(bench_of: Made) -> None:
    bench = bench_of("two copies of two shards")
    bench.publish(1)
    with torch.no_grad():
        bench.models[3].embed.weight[6, 0] += 1
    with pytest.raises(
        ReplicasDiverged, match=r"ranks 1 and 3 have different copies of .*embed\.weight\[4:"
    ):
        bench.publish(2)


def test_a_tensor_that_the_ranks_do_not_hold_completely_is_named() -> None:
    held = [[("w", Region((0, 0), (2, 3)))], [("w", Region((3, 0), (4, 3)))]]
    with pytest.raises(WeightsNotCovered, match="w: 3 of its elements are on none of 2"):
        plan_buckets([TensorMeta("w", (4, 3), "float32")], held, 1000)
    with pytest.raises(WeightsNotCovered, match="v: 4 of its elements"):
        plan_buckets([TensorMeta("v", (4,), "float32")], held, 1000)


def test_ranks_with_different_plans_publish_nothing_until_they_agree(bench_of: Made) -> None:
    bench, (models, receivers) = bench_of("three copies"), ends(1)
    ranks, other = len(bench.senders), bench.next_plans[2]
    before, layout, found = weights(models[0]), EngineLayout((), ((),)), list[PlansDiffer]()
    barrier, gathered = threading.Barrier(ranks, timeout=10.0), [None] * ranks

    def start(rank: int) -> None:
        source = HeldShards(other if rank == 2 else bench.plan, rank, list)
        ReshardSender(source, bench.servers[rank], ThreadPeers(rank, barrier, gathered))

    def differs(call: Callable[[], object]) -> None:
        with pytest.raises(PlansDiffer) as error:
            call()
        found.append(error.value)

    together(*(partial(differs, partial(start, rank)) for rank in range(ranks)))
    bench.next_plans[2] = bench.plan
    together(*(partial(differs, partial(each.publish, 1, layout)) for each in bench.senders))
    assert [each.ranks for each in found] == [(0, 2)] * 2 * ranks
    assert "ranks 0 and 2 have different plans" in str(found[0])
    assert all(each.offered is None for each in bench.servers)
    assert equal(weights(models[0]), before)
    bench.next_plans[2] = other
    bench.follow(layout)
    heals(models, receivers, bench)


def test_zeroed_memory_would_be_seen(bench_of: Made) -> None:
    """The comparison with the trainer is of values, not of shapes."""
    bench, ((model,), (receiver,)) = bench_of(), ends(1)
    receiver.take(bench.publish(1), 1)
    assert serves(model, bench)
    assert np.abs(model.embed.weight.detach().numpy()).sum() > 0
    with torch.no_grad():
        model.embed.weight.zero_()
    assert not serves(model, bench)
