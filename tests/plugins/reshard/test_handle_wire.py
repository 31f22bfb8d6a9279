"""Buckets that are copied out of the sender's memory: when that may change, and what if it does."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from bench_parts import HASTY, together
from reshard_bench import ReshardBench, ReshardEnd, reshard_end, serves
from torch import Tensor

from offbeat.plugins.reshard.group import BrokenLink, meet
from offbeat.plugins.reshard.handle_wire import HandleLink, HandleUnusable, HandleWire
from offbeat.plugins.reshard.messages import Route
from offbeat.plugins.reshard.receiver import ReceivedBuckets, ReshardReceiver
from offbeat.weight_sync.buffers import Buffers
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.errors import TransferFailed
from offbeat.weight_sync.rendezvous.frames import SharedKey
from offbeat.weight_sync.rendezvous.store_server import StoreServer
from tests.support.weight_models import Model, equal, weights
from tests.support.wire_doubles import SharedMemory


class Halted(SharedMemory):
    """Memory whose copies wait: ``began`` says that one has begun, ``go`` lets it begin to read."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go = threading.Event(), threading.Event()

    def copy(self, handle: bytes, into: Tensor) -> None:
        self.began.set()
        self.go.wait(60.0)
        super().copy(handle, into)


def receiving(memory: SharedMemory, model: Model) -> ReshardEnd:
    """An engine that copies with this memory."""
    found = reshard_end("g0", model)
    found.transport = ReshardReceiver("g0", wires=lambda name, _: HandleWire(name, memory))
    return found


def addresses(bench: ReshardBench) -> set[int]:
    """Memory of the buckets that are offered."""
    offered = bench.servers[0].offered
    assert offered is not None
    return {each.data_ptr() for each in offered.buckets.values() if isinstance(each, Tensor)}


def memory_of(bench: ReshardBench) -> SharedMemory:
    """What the sender allocates from."""
    wire = bench.servers[0].wire
    assert isinstance(wire, HandleWire)
    assert isinstance(wire._memory, SharedMemory)  # noqa: SLF001
    return wire._memory  # noqa: SLF001


def free(bench: ReshardBench) -> set[int]:
    """Memory that the sender may pack into."""
    wire = bench.servers[0].wire
    assert isinstance(wire, HandleWire)
    return {each.data_ptr() for some in wire._pool._free.values() for each in some}  # noqa: SLF001


def over(bench: ReshardBench) -> None:
    """Wait until nothing is being sent: it is done, or its limit is over."""
    for stream in list(bench.servers[0]._streams.values()):  # noqa: SLF001
        stream.join(60.0)


def test_memory_is_packed_into_again_after_the_receipt_and_not_before() -> None:
    bench, memory, model = ReshardBench(1, wire="cuda_ipc"), Halted(), Model(5)
    engine = receiving(memory, model)
    published, before = bench.publish(1), addresses(bench)
    taking = threading.Thread(target=partial(engine.take, published, 1))
    taking.start()
    assert memory.began.wait(60.0)
    bench.publish(2)
    assert not addresses(bench) & before, "still being copied"
    memory.go.set()
    taking.join()
    assert isinstance(engine.outcome, ReceivedBuckets), engine.outcome
    assert serves(model, bench)
    over(bench)
    assert before <= free(bench), "nobody refers to the first release any more"
    bench.close()


def test_memory_of_a_former_plan_goes_back_when_the_plan_is_replaced() -> None:
    bench, model = ReshardBench(1, wire="cuda_ipc"), Model(5)
    memory, engine = memory_of(bench), reshard_end("g0", model)
    former = bench.publish(1)
    engine.take(former, 1)
    over(bench)
    assert memory.allocated == former.manifest.nbytes
    bench.follow(EngineLayout((), ()))
    for version in (2, 3):
        published = bench.publish(version)
        assert published.manifest.chunk_nbytes != former.manifest.chunk_nbytes
        engine.take(published, version)
        over(bench)
        assert memory.allocated == published.manifest.nbytes, "buckets of the new plan alone"
        assert serves(model, bench)
        bench.train()
    bench.close()


def test_memory_that_is_still_sent_goes_back_after_that_and_leaves_no_handle() -> None:
    memory = SharedMemory()
    wire = HandleWire("cuda_ipc", memory)
    lent, returned = wire.memory_to_send(64), wire.memory_to_send(32)
    handles = [wire._pool.handle(each) for each in (lent, returned)]  # noqa: SLF001
    del returned
    wire.release_memory()
    assert memory.allocated == 64, "only what is lent"
    assert wire._pool.handle(lent) == handles[0], "a late engine may still get it"  # noqa: SLF001
    del lent
    assert memory.allocated == 0
    assert not wire._pool._handles, "the next memory at this address has another"  # noqa: SLF001


def test_main_memory_of_a_former_plan_goes_back_too() -> None:
    buffers = Buffers()
    lent, returned = buffers.lend(64), buffers.lend(32)
    del returned
    kept = weakref.ref(buffers._free[32][0])  # noqa: SLF001
    assert kept() is not None, "for the next release"
    buffers.release()
    assert kept() is None
    del lent
    assert not any(buffers._free.values()), "what was still sent is not kept either"  # noqa: SLF001


def test_what_is_copied_after_the_sender_gave_up_reaches_no_parameter() -> None:
    """A stopped engine goes on when the memory holds another release."""
    bench = ReshardBench(1, wire="cuda_ipc", timeouts=HASTY)
    memory, model = Halted(), Model(5)
    engine, served = receiving(memory, model), weights(model)
    published, before = bench.publish(1), addresses(bench)
    taking = threading.Thread(target=partial(engine.take, published, 1))
    taking.start()
    assert memory.began.wait(60.0)
    over(bench)
    bench.train()
    bench.publish(2)
    assert addresses(bench) & before, "the memory holds the next release"
    memory.go.set()
    taking.join()
    assert isinstance(engine.outcome, TransferFailed)
    assert "with digest" in str(engine.outcome) or "Connection" in str(engine.outcome)
    assert equal(weights(model), served)
    engine.take(bench.publish(3), 9)
    assert serves(model, bench)
    bench.close()


def test_memory_that_cannot_be_opened_ends_the_fetch_by_name() -> None:
    class Unusable(SharedMemory):
        def copy(self, handle: bytes, into: Tensor) -> None:
            raise HandleUnusable("memory of GPU-0 cannot be opened: invalid argument")

    bench, model = ReshardBench(1, wire="cuda_ipc", timeouts=HASTY), Model(5)
    engine, served = receiving(Unusable(), model), weights(model)
    engine.take(bench.publish(1), 1)
    assert "sender rank 0: memory of GPU-0 cannot be opened" in str(engine.outcome)
    assert equal(weights(model), served)
    bench.close()


def test_an_engine_on_another_machine_is_refused_before_it_connects() -> None:
    bench, model = ReshardBench(1, wire="cuda_ipc"), Model(5)
    engine = receiving(SharedMemory(machine="another"), model)
    engine.take(bench.publish(1), 1)
    assert isinstance(engine.outcome, TransferFailed)
    assert "works within a machine; the sender is on machine" in str(engine.outcome)
    bench.close()


class Links:
    """Both ends of a link."""

    def __init__(self) -> None:
        key, host = SharedKey.random(), "127.0.0.1"
        self.store, self.memory = StoreServer(host, key), SharedMemory()
        route = Route(host, 0, self.store.port, key, "rank-0", 0, "", HASTY)
        wire = HandleWire("cuda_ipc", self.memory)
        made: dict[int, HandleLink] = {}

        def connect(rank: int) -> None:
            place = meet(route, "session", rank)
            made[rank] = wire.link(place, route, host)  # type: ignore[assignment]

        together(partial(connect, 0), partial(connect, 1))
        self.sender, self.receiver, self.wire = made[0], made[1], wire

    def close(self) -> None:
        for each in (self.sender, self.receiver, self.store):
            with suppress(AttributeError):  # closed by the test
                each.close()


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


def test_buckets_arrive_in_order_and_the_sender_learns_of_each_copy(links: Links) -> None:
    sent = [links.wire.memory_to_send(64).fill_(number) for number in range(3)]
    into = [links.wire.memory_to_receive(64) for _ in sent]
    for tag in (0, 1):
        links.sender.send(sent[tag], tag)
        links.receiver.receive(into[tag], tag)
    assert links.receiver.wait(5.0) is into[0]
    assert links.sender.wait(5.0) is sent[0]
    links.sender.send(sent[2], 2)
    links.receiver.receive(into[2], 2)
    assert [links.sender.in_flight, links.receiver.in_flight] == [2, 2]
    together(partial(links.sender.finish, 5.0), partial(links.receiver.finish, 5.0))
    assert [each[0].item() for each in into] == [0, 1, 2]


def test_a_bucket_of_another_size_breaks_the_link(links: Links) -> None:
    links.sender.send(links.wire.memory_to_send(64), 0)
    links.receiver.receive(links.wire.memory_to_receive(32), 0)
    with pytest.raises(BrokenLink, match="bucket 0 has 64 bytes, expected 32"):
        links.receiver.wait(5.0)


def test_a_silent_end_breaks_the_link_at_the_limit(links: Links) -> None:
    links.sender.send(links.wire.memory_to_send(64), 0)
    with pytest.raises(BrokenLink, match="Timed out"):
        links.sender.wait(0.01)


def test_an_end_that_closes_breaks_the_link_at_once(links: Links) -> None:
    links.sender.send(links.wire.memory_to_send(64), 0)
    links.receiver.close()
    with pytest.raises(BrokenLink, match="Connection"):
        links.sender.wait(60.0)


def test_memory_that_nothing_refers_to_leaves_no_file_open() -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before, memory = opened(), SharedMemory()
    lent = [memory.allocate(64) for _ in range(9)]
    assert opened() > before
    del lent
    assert opened() == before
