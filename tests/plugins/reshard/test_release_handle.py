"""Handles of a reshard, as an engine and its workers read them."""

import pickle

from offbeat.plugins.reshard.messages import Route, ShardRoute, TransferTimeouts
from offbeat.weight_sync.buckets import BucketRoute
from offbeat.weight_sync.rendezvous.frames import SharedKey
from offbeat.weight_sync.transport import ReleaseHandle
from offbeat.weight_sync.transport_plugin import find_transport

BUCKETS = (BucketRoute((0, 1), ((0, 0),)), BucketRoute((1,), ((0, 1),)))
RANKS = tuple(
    Route(
        "127.0.0.1", 1, 2, SharedKey(b"x" * 32), f"rank-{rank}", 3, "d3", TransferTimeouts(1.0, 1.0)
    )
    for rank in range(2)
)
HANDLE = ShardRoute(3, "d3", BUCKETS, RANKS)


def test_an_engine_finds_the_transport_of_a_handle_that_crossed_processes() -> None:
    arrived = pickle.loads(pickle.dumps(HANDLE))  # noqa: S301 -- of this test
    assert isinstance(arrived, ReleaseHandle)
    assert (arrived.transport, arrived.version, arrived.buckets) == ("reshard", 3, BUCKETS)


def test_a_worker_that_knows_the_buckets_makes_the_handle_of_the_ranks_alone() -> None:
    transport = find_transport(HANDLE.transport)
    assert transport.decode_senders(HANDLE.encode_senders(), BUCKETS) == HANDLE
