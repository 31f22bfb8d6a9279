"""``kill -9`` and ``kill -STOP`` at every bucket of a reshard, on processes of their own."""

import multiprocessing as mp
import signal
from functools import partial
from multiprocessing.connection import Connection

import pytest
from bench_parts import HASTY, PATIENT, together
from reshard_bench import GROUPS, HANDLES, TCP, ReshardBench, copied, reshard_end, rows_of, serves
from victims import Victims, strike_self

from offbeat.plugins.reshard.messages import ShardRoute
from offbeat.plugins.reshard.receiver import ReceivedBuckets
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.errors import TransferFailed
from offbeat.weight_sync.transport import PublishedRelease
from tests.support.weight_models import Model, equal, weights

RANKS = 4
HANGS = pytest.param(signal.SIGSTOP, marks=pytest.mark.long)  # each bucket costs a limit
over_each_wire = pytest.mark.parametrize(
    "wire", [TCP, *(pytest.param(each, marks=pytest.mark.long) for each in (HANDLES, GROUPS))]
)


def engine(published: PublishedRelease, epoch: int, at: int, sign: int) -> None:
    """A process that fetches, and strikes itself when it has so many buckets."""
    arrived = list[int]()

    def on_bucket(bucket: int, data: BucketMemory) -> None:
        del data
        arrived.append(bucket)
        if len(arrived) == at:
            strike_self(sign)

    reshard_end("victim", Model(2)).take(published, epoch, on_bucket)


def ranks(told: Connection, at: int, sign: int, layout: str, wire: str) -> None:
    """A process with all ranks of a trainer, that strikes itself before bucket ``at`` is sent."""
    count, held = (RANKS, copied(rows_of(2), 2)) if layout == "copies" else (2, rows_of(2))
    # A link that forms meanwhile waits its slack
    bench = ReshardBench(count, held, timeouts=HASTY, wire=wire)
    published = bench.publish(1)

    def strike(bucket: int) -> None:
        if bucket == at:
            strike_self(sign)

    for rank in range(count):
        bench.struck(rank, strike)
    told.send((published, bench.count))
    told.recv()


@over_each_wire
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_at_every_bucket_an_engine_that_is_lost_costs_the_others_nothing(
    victims: Victims, sign: int, wire: str
) -> None:
    bench, models = ReshardBench(2, timeouts=PATIENT, wire=wire), [Model(5), Model(6)]
    others = [reshard_end(f"g{index}", model) for index, model in enumerate(models)]
    for epoch in range(1, bench.count + 1):
        published = bench.publish(epoch)
        victims.start(engine, published, epoch, epoch, sign)
        together(*(partial(each.take, published, epoch) for each in others))
        assert all(isinstance(each.outcome, ReceivedBuckets) for each in others)
        assert all(serves(model, bench) for model in models)
        bench.train()
    victims.kill()
    bench.close()


@over_each_wire
@pytest.mark.parametrize("sign", [signal.SIGKILL, HANGS])
def test_at_every_bucket_ranks_that_are_lost_leave_all_as_they_were_and_the_next_ones_heal(
    victims: Victims, sign: int, wire: str
) -> None:
    model = Model(5)
    receiver, before = reshard_end("g0", model), weights(model)
    at, count = 0, 1
    while at < count:
        ours, theirs = mp.Pipe()
        victims.start(ranks, theirs, at, sign, "shards", wire)
        published, count = ours.recv()
        receiver.take(published, at + 1)
        assert isinstance(receiver.outcome, TransferFailed), receiver.outcome
        assert "no other rank holds bucket" in str(receiver.outcome)
        at += 1
    assert equal(weights(model), before)
    healthy = ReshardBench(2, wire=wire)
    receiver.take(healthy.publish(1), 99)
    assert serves(model, healthy)
    healthy.close()


@over_each_wire
@pytest.mark.parametrize("sign", [signal.SIGKILL, HANGS])
def test_at_every_bucket_a_rank_that_is_lost_is_replaced_by_the_copies_of_its_weights(
    victims: Victims, sign: int, wire: str
) -> None:
    """The copy in another process: two processes with equal weights, each with all ranks."""
    layout = copied(rows_of(2), 2)
    bench = ReshardBench(RANKS, layout, timeouts=HASTY, wire=wire)
    manifest, digest, (here,), *_ = bench.publish(1)
    buckets = [at for at, each in enumerate(here.buckets) if each.sender_by_receiver[0][1] < 2]
    assert buckets
    for at in buckets:
        model = Model(5)
        receiver = reshard_end("g0", model)
        ours, theirs = mp.Pipe()
        victims.start(ranks, theirs, at, sign, "copies", wire)
        (_, _, (there,), *_), _ = ours.recv()
        assert there.digest == digest, "equal weights make equal releases"
        # The first two ranks are in the other process
        senders = (*there.senders[:2], *here.senders[2:])
        route = ShardRoute(1, digest, here.buckets, senders)
        receiver.take(PublishedRelease(manifest, digest, (route,)), 1)
        outcome = receiver.outcome
        assert isinstance(outcome, ReceivedBuckets), outcome
        assert outcome.failed
        assert outcome.resent
        assert serves(model, bench)
    bench.close()
