"""Calls of the queue that end early, fail, or come at a bad moment: nothing is lost, held or forgotten."""

import asyncio
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from offbeat.messages.failures import ActorLost, DeadlineExceeded, SchemaError
from offbeat.queue_service import wire
from offbeat.queue_service.clients.asyncio_client import TransferQueueClient
from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.core.records import PutReceipt, QueueLimits, Schema
from offbeat.queue_service.server.connections import Connection
from offbeat.queue_service.server.server import QueueServer
from offbeat.queue_service.storage.arenas import Slot
from offbeat.transfer_queue.codec import BFLOAT16
from tests.support.queue_service import ADVANTAGES, COLUMNS, ROOMY, group, running

LONG_S = 30.0  # nothing here takes it
LARGE = 40_000  # tokens: through shared memory


@pytest.fixture
def client() -> Iterator[SyncTransferQueueClient]:
    with running() as path, SyncTransferQueueClient.connect(path) as client:
        client.declare("train", COLUMNS)
        yield client


async def waits(client: TransferQueueClient, count: int) -> None:
    """Until so many calls wait in the service; those of this loop have been sent before."""
    while sum((await client.stats()).queue.waits.values()) < count:
        pass


# --- claims ----------------------------------------------------------------------------------


def test_a_claim_cancelled_in_the_turn_of_its_answer_gives_the_groups_back() -> None:
    async def scenario() -> None:
        server = QueueServer(ROOMY)
        path = await server.open()
        async with (
            await TransferQueueClient.connect(path) as consumer,
            await TransferQueueClient.connect(path) as other,
        ):
            await other.declare("train", COLUMNS)
            for name in "ab":
                await other.put("train", name, group(1))
            both = await other.claim("train", "t", 2)
            assert both is not None

            async def first() -> ClientLease | None:
                lease = await consumer.claim("train", "t", deadline_s=LONG_S)
                second.cancel()  # its answer came in the same packet: its future is done
                return lease

            winner = asyncio.create_task(first())
            second = asyncio.create_task(consumer.claim("train", "t", deadline_s=LONG_S))
            await waits(other, 2)
            await other.release(both)
            lease = await winner
            await asyncio.gather(second, return_exceptions=True)
            assert lease is not None
            assert second.cancelled()
            await consumer.stats()  # what it had to say came before this
            assert (await other.stats()).queue.leases == 1
        server.close()

    asyncio.run(scenario())


def test_every_call_is_answered_once_those_too_that_are_taken_back() -> None:
    async def scenario() -> None:
        server, replies = QueueServer(ROOMY), list[wire.Reply]()
        await server.open()
        connection = Connection(replies.append)
        claim = wire.Claim("train", "t", 1, 1, (), (), LONG_S, LONG_S)
        schema = Schema(COLUMNS)
        for id_, op in enumerate(
            (wire.Attach(None, maps=False), wire.Declare("train", schema), claim)
        ):
            server.handler.take(connection, wire.WireCall(id_ + 1, op))
        for _ in range(2):
            server.handler.take(connection, wire.WireCall(wire.ONE_WAY, wire.Nothing(), cancels=3))
        assert [reply.id for reply in replies] == [1, 2, 3]
        assert wire.value_of(claim, replies[-1]) is None
        server.close()

    asyncio.run(scenario())


def test_a_client_that_gives_two_calls_one_number_harms_nobody() -> None:
    async def scenario() -> None:
        trouble = list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, told: trouble.append(told))
        server, replies = QueueServer(ROOMY), list[wire.Reply]()
        path = await server.open()
        async with await TransferQueueClient.connect(path) as client:
            await client.declare("train", COLUMNS)
            connection = Connection(replies.append)
            claim = wire.Claim("train", "t", 1, 1, (), (), LONG_S, LONG_S)
            for _ in range(2):
                server.handler.take(connection, wire.WireCall(7, claim))
            for name in ("a", "b"):
                await client.put("train", name, group(1))
            server.handler.leave(connection)
            assert (await client.stats()).queue.waits == {}
        server.close()
        refused, delivered = replies
        assert refused.failure is not None and "waits already" in str(refused.failure)
        assert delivered.failure is None
        assert trouble == []

    asyncio.run(scenario())


def test_a_call_that_cannot_be_written_leaves_nothing_behind_in_the_client() -> None:
    forgotten = list[dict[str, Any]]()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: forgotten.append(told))
        server = QueueServer(ROOMY)
        path = await server.open()
        async with await TransferQueueClient.connect(path) as client:
            await client.declare("train", COLUMNS)
            with pytest.raises(OverflowError):
                await client.put("train", "a", group(1), {"seed": [1 << 70] * 4})
        server.close()
        gc.collect()

    asyncio.run(scenario())
    assert forgotten == []


def test_a_predicate_that_is_none_is_refused_by_name(client: SyncTransferQueueClient) -> None:
    with pytest.raises(SchemaError, match="where"):
        client.claim("train", "t", where=(("reward", ">", np.float32(1)),))


def test_a_claim_is_answered_though_its_group_is_replaced_in_the_same_moment() -> None:
    """A client leaves: its place in line lets in a newer attempt of the very group it gives back."""

    async def scenario() -> None:
        server = QueueServer(QueueLimits(max_rows=8, max_bytes=1 << 30))
        path = await server.open()
        leaving = await TransferQueueClient.connect(path)
        async with (
            await TransferQueueClient.connect(path) as producer,
            await TransferQueueClient.connect(path) as consumer,
        ):
            await producer.declare("train", COLUMNS)
            await producer.put("train", "a", group(1), attempt=1)
            lease = await leaving.claim("train", "t")
            assert lease is not None
            calls = list[asyncio.Task[object]]()
            for call in (
                leaving.put("train", "big", group(2, rows=8), deadline_s=LONG_S),
                producer.put("train", "a", group(3), attempt=2, deadline_s=LONG_S),
                consumer.claim("train", "t", deadline_s=LONG_S),
            ):
                calls.append(asyncio.create_task(call))
                await waits(producer, len(calls))
            await leaving.close()
            left, receipt, got = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(left, ActorLost)
            assert isinstance(receipt, PutReceipt)
            assert isinstance(got, ClientLease)
            assert receipt.attempt == 2
            assert [each.attempt for each in got.receipts] == [1]
            await consumer.ack(got)
            again = await consumer.claim("train", "t")
            assert again is not None
            assert again.receipts == (receipt,)
        server.close()

    asyncio.run(scenario())


# --- reading ---------------------------------------------------------------------------------


def test_asking_for_a_column_that_is_not_there_costs_nobody_the_group(
    client: SyncTransferQueueClient,
) -> None:
    receipt = client.put("train", "a", {"ids": np.zeros((4, 2), np.int64)})
    lease = client.claim("train", "t")
    assert lease is not None
    for source in (lease, receipt):
        for name in ("logprobs", "a typo"):
            with pytest.raises(SchemaError, match=f"'{name}' is not written"):
                client.get(source, ["ids", name])
    assert client.take_lost("train") == []
    assert list(client.get(lease, ["ids"])) == ["ids"]


@contextmanager
def no_more_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_reader_that_is_short_of_files_costs_nobody_the_group(
    client: SyncTransferQueueClient,
) -> None:
    receipt = client.put("train", "a", group(1, LARGE))
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        client.get(receipt)
    assert client.take_lost("train") == []
    assert list(client.get(receipt, ["ids"])) == ["ids"]


def test_a_bfloat16_column_is_declared_under_that_name(client: SyncTransferQueueClient) -> None:
    bits = np.arange(8, dtype=np.uint16).reshape(4, 2)
    client.declare("half", [("hidden", "bfloat16")])
    receipt = client.put("half", "a", {"hidden": bits.view(BFLOAT16)})
    got = client.get(receipt)["hidden"]
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got.view(np.uint16), bits)


@pytest.mark.parametrize(
    ("values", "rows"), [(3, None), (5, None), (4, slice(0, 2)), (2, slice(0, 4, 2))]
)
def test_columns_added_for_other_rows_than_there_are_values_are_refused(
    client: SyncTransferQueueClient, values: int, rows: slice | None
) -> None:
    client.declare("scored", (*COLUMNS, ADVANTAGES))
    receipt = client.put("scored", "a", group(1))
    with pytest.raises(SchemaError, match=f"'advantages' is {values} rows"):
        client.add_columns(receipt, {"advantages": np.zeros(values, np.float32)}, rows)
    assert client.claim("scored", "trainer", columns=("advantages",)) is None
    client.add_columns(receipt, {"advantages": np.zeros(4, np.float32)})
    assert client.claim("scored", "trainer", columns=("advantages",)) is not None


# --- ends ------------------------------------------------------------------------------------


class Silent:
    """Carries calls to a service that does not answer."""

    closed = False
    client = "client-1"

    def exchange(self, op: wire.Op, unpinned: tuple[Slot, ...], wait_s: float) -> wire.Reply:
        raise DeadlineExceeded(self.client, f"{type(op).__name__} of queue", 1.0)

    def close(self) -> None:
        self.closed = True


class SilentLoop(Silent):
    async def exchange(self, op: wire.Op, unpinned: tuple[Slot, ...], wait_s: float) -> wire.Reply:
        return super().exchange(op, unpinned, wait_s)


def test_a_client_whose_service_hangs_hangs_up_though_it_cannot_say_goodbye() -> None:
    link = Silent()
    with pytest.raises(DeadlineExceeded, match="Leave"):
        SyncTransferQueueClient.over(link).close()
    assert link.closed
    loop_link = SilentLoop()
    with pytest.raises(DeadlineExceeded, match="Leave"):
        asyncio.run(TransferQueueClient.over(loop_link).close())
    assert loop_link.closed
