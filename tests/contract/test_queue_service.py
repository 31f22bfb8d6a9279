"""What the service promises its clients, over its socket: waits, leases, bounds, and deaths."""

import asyncio
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.messages.failures import ActorLost, DeadlineExceeded, SchemaError
from offbeat.messages.framing import LENGTH, framed
from offbeat.queue_service.clients.asyncio_client import TransferQueueClient
from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.core.records import QueueLimits
from offbeat.queue_service.errors import (
    ClientClosed,
    LeaseExpired,
    QueueFull,
    QueuePayloadLost,
    TooLarge,
    UnknownPartition,
)
from offbeat.queue_service.server.server import QueueServer
from offbeat.queue_service.wire import frames
from offbeat.transfer_queue.errors import StaleHandle
from tests.support.queue_service import (
    COLUMNS,
    ROOMY,
    group,
    memory_falls_to,
    program,
    running,
    same,
)

LONG_S = 30.0  # nothing here takes it
TWO_GROUPS = QueueLimits(max_rows=8, max_bytes=1 << 30)
Connect = Callable[[], Coroutine[Any, Any, TransferQueueClient]]


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


@asynccontextmanager
async def service(limits: QueueLimits = ROOMY) -> AsyncIterator[Connect]:
    """A service on this loop, and how to come to a client of it."""
    server, clients = QueueServer(limits), list[TransferQueueClient]()
    path = await server.open()

    async def connect() -> TransferQueueClient:
        client = await TransferQueueClient.connect(path)
        clients.append(client)
        await client.declare("train", COLUMNS)
        return client

    try:
        yield connect
    finally:
        for client in clients:
            await client.close()
        server.close()


async def claimed(
    client: TransferQueueClient, task: str = "t", n: int = 1, **options: Any
) -> ClientLease:
    lease = await client.claim("train", task, n, deadline_s=LONG_S, **options)
    assert lease is not None
    return lease


async def waiting(client: TransferQueueClient, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A call that has come to the service and waits there: calls of a client arrive in order."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    await client.stats()
    assert not task.done()
    return task


# --- waits -----------------------------------------------------------------------------------


@on_a_loop
async def test_a_claim_that_waits_is_answered_by_the_put_that_completes_it() -> None:
    async with service() as connect:
        producer, consumer = await connect(), await connect()
        claim = await waiting(consumer, claimed(consumer, n=2))
        await producer.put("train", "a", group(1))
        await producer.put("train", "b", group(2))
        lease = await claim
        assert [receipt.group for receipt in lease.receipts] == ["a", "b"]
        assert (await consumer.stats()).waited_s.keys() == {"Claim"}


@on_a_loop
async def test_a_starved_consumer_delays_nobody() -> None:
    async with service() as connect:
        starved, fed, producer = await connect(), await connect(), await connect()
        claim = await waiting(starved, claimed(starved, n=100))
        await producer.put("train", "a", group(1))
        assert (await claimed(fed)).receipts[0].group == "a"
        assert not claim.done()
        assert (await fed.stats()).queue.waits == {"groups": 1}
        claim.cancel()


@on_a_loop
async def test_a_claim_comes_back_empty_at_its_deadline() -> None:
    async with service() as connect:
        client = await connect()
        assert await client.claim("train", "t", deadline_s=0) is None
        assert await client.claim("train", "t", deadline_s=0.01) is None
        assert (await client.stats()).queue.waits == {}


@on_a_loop
async def test_any_number_of_claims_wait_at_a_time_and_each_group_goes_to_one() -> None:
    async with service() as connect:
        producer, consumer = await connect(), await connect()
        claims = [asyncio.create_task(claimed(consumer)) for _ in range(100)]
        await asyncio.gather(*(producer.put("train", f"g{i}", group(i)) for i in range(100)))
        leases = await asyncio.gather(*claims)
        assert {lease.receipts[0].group for lease in leases} == {f"g{i}" for i in range(100)}


@on_a_loop
async def test_a_cancelled_claim_is_taken_back_and_its_group_goes_to_another() -> None:
    async with service() as connect:
        impatient, other = await connect(), await connect()
        claim = await waiting(impatient, claimed(impatient))
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)
        await impatient.put("train", "a", group(1))
        assert (await claimed(other)).receipts[0].group == "a"


@on_a_loop
async def test_a_claim_cancelled_as_its_answer_comes_gives_the_groups_back() -> None:
    async with service() as connect:
        impatient, other = await connect(), await connect()
        claim = await waiting(impatient, claimed(impatient))
        put = asyncio.create_task(other.put("train", "a", group(1, 40_000)))
        await put  # the lease is granted; its reply is on the way, or here
        claim.cancel()
        got = (await asyncio.gather(claim, return_exceptions=True))[0]
        if isinstance(got, ClientLease):
            await impatient.release(got)
        lease = await claimed(other)
        await other.ack(lease, clear=True)
        del lease, got, claim
        while (await other.stats()).arena_bytes:
            pass


# --- bounds ----------------------------------------------------------------------------------


@on_a_loop
async def test_a_put_waits_for_room_and_is_let_in_by_the_clear_that_makes_it() -> None:
    async with service(TWO_GROUPS) as connect:
        producer, consumer = await connect(), await connect()
        first = await producer.put("train", "a", group(1))
        await producer.put("train", "b", group(2))
        put = await waiting(producer, producer.put("train", "c", group(3), deadline_s=LONG_S))
        assert (await consumer.stats()).queue.waits == {"rows": 1}
        await consumer.clear([first])
        assert (await put).group == "c"


@on_a_loop
async def test_a_put_that_waited_in_vain_says_for_what_and_leaves_nothing() -> None:
    async with service(TWO_GROUPS) as connect:
        producer = await connect()
        for name in "ab":
            await producer.put("train", name, group(1))
        with pytest.raises(QueueFull, match=r"rows after 0\.01 s: 8 of 8 are taken") as full:
            await producer.put("train", "c", group(3, 40_000), deadline_s=0.01)
        assert (full.value.limit, full.value.waited_s) == ("rows", 0.01)
        stats = await producer.stats()
        assert (stats.queue.groups, stats.arena_bytes) == (2, 0)


@on_a_loop
async def test_a_put_that_can_never_fit_does_not_wait() -> None:
    async with service(TWO_GROUPS) as connect:
        producer = await connect()
        with pytest.raises(TooLarge, match="can never fit"):
            await producer.put("train", "a", group(1, rows=9), deadline_s=LONG_S)


@on_a_loop
async def test_a_cancelled_put_stores_nothing_and_gives_its_memory_back() -> None:
    async with service(TWO_GROUPS) as connect:
        producer = await connect()
        for name in "ab":
            await producer.put("train", name, group(1))
        put = asyncio.create_task(producer.put("train", "c", group(3, 40_000)))
        while not (stats := await producer.stats()).queue.waits:
            pass
        assert stats.arena_bytes > 0
        put.cancel()
        await asyncio.gather(put, return_exceptions=True)
        stats = await producer.stats()
        assert (stats.queue.groups, stats.queue.waits, stats.arena_bytes) == (2, {}, 0)


# --- exactly once ----------------------------------------------------------------------------


@on_a_loop
async def test_a_put_repeated_because_its_answer_was_lost_changes_nothing() -> None:
    async with service() as connect:
        producer = await connect()
        first = await producer.put("train", "a", group(1, 40_000), attempt=3)
        before = (await producer.stats()).arena_bytes
        assert await producer.put("train", "a", group(1, 40_000), attempt=3) == first
        assert (await producer.stats()).arena_bytes == before


@on_a_loop
async def test_a_late_writer_is_told_so_and_overwrites_nothing() -> None:
    async with service() as connect:
        late, client = await connect(), await connect()
        receipt = await client.put("train", "a", group(2), attempt=2)
        with pytest.raises(StaleHandle, match="attempt 1"):
            await late.put("train", "a", group(1), attempt=1)
        await client.clear([receipt])
        with pytest.raises(StaleHandle):
            await client.get(receipt)


@on_a_loop
async def test_an_expired_lease_cannot_be_acked_and_its_groups_come_again() -> None:
    async with service() as connect:
        slow, other = await connect(), await connect()
        await slow.put("train", "a", group(1))
        lease = await claimed(slow, lease_s=0.001)
        again = await claimed(other)
        assert again.receipts == lease.receipts
        with pytest.raises(LeaseExpired):
            await slow.ack(lease)
        await other.ack(again)


@on_a_loop
async def test_a_renewed_lease_lasts() -> None:
    async with service() as connect:
        client = await connect()
        await client.put("train", "a", group(1))
        lease = await claimed(client, lease_s=LONG_S)
        before = lease.expires_at
        await client.renew(lease, 10 * LONG_S)
        assert lease.expires_at > before + LONG_S
        await client.release(lease)
        assert (await claimed(client)).receipts == lease.receipts


@on_a_loop
async def test_groups_that_cannot_be_read_are_listed_once_and_named() -> None:
    async with service() as connect:
        client = await connect()
        receipt = await client.put("train", "a", group(1))
        await client.report_lost([receipt], "its disk burnt")
        with pytest.raises(QueuePayloadLost, match="its disk burnt"):
            await client.get(receipt)
        assert [(lost.group, lost.reason) for lost in await client.take_lost("train")] == [
            ("a", "its disk burnt")
        ]
        assert await client.take_lost("train") == []


@on_a_loop
async def test_claims_select_by_tags() -> None:
    async with service() as connect:
        client = await connect()
        for i in range(4):
            await client.put("train", f"g{i}", group(i), {"reward": [float(i)] * 4})
        lease = await claimed(client, n=2, where=(("reward", ">=", 2.0),))
        assert [receipt.tags["reward"][0] for receipt in lease.receipts] == [2.0, 3.0]


@on_a_loop
async def test_errors_arrive_as_their_own_class_with_their_fields() -> None:
    async with service() as connect:
        client = await connect()
        with pytest.raises(UnknownPartition) as unknown:
            await client.put("evil", "a", group(1))
        assert (unknown.value.partition, unknown.value.known) == ("evil", ("train",))
        with pytest.raises(SchemaError) as schema:
            await client.put("train", "a", {"ids": group(1)["logprobs"]})
        assert schema.value.column == "ids"


@on_a_loop
async def test_an_ack_repeated_because_its_answer_was_lost_changes_nothing() -> None:
    async with service() as connect:
        client = await connect()
        await client.put("train", "a", group(1))
        lease = await claimed(client)
        await client.ack(lease, clear=True)
        await client.ack(lease, clear=True)
        assert (await client.stats()).queue.groups == 0


# --- deaths ----------------------------------------------------------------------------------


def test_a_killed_consumer_gives_its_groups_back_at_once() -> None:
    with running() as path, SyncTransferQueueClient.connect(path) as client:
        client.declare("train", COLUMNS)
        client.put("train", "a", group(1, 40_000))
        body = "lease = c.claim('train', 't', lease_s=3600); columns = c.get(lease)"
        with program(path, body) as consumer:
            assert client.claim("train", "t") is None
            consumer.kill()
            lease = client.claim("train", "t", deadline_s=LONG_S)
        assert lease is not None
        assert same(client.get(lease), group(1, 40_000))
        client.ack(lease, clear=True)
        del lease
        assert memory_falls_to(client, 0)  # what the dead one viewed is free too


def test_a_client_that_closes_gives_its_groups_back_and_keeps_its_views() -> None:
    with running() as path, SyncTransferQueueClient.connect(path) as client:
        client.declare("train", COLUMNS)
        client.put("train", "a", group(1, 40_000))
        leaving = SyncTransferQueueClient.connect(path)
        lease = leaving.claim("train", "t")
        assert lease is not None
        view = leaving.get(lease)
        del lease
        leaving.close()
        with pytest.raises(ClientClosed):
            leaving.stats()
        again = client.claim("train", "t", deadline_s=LONG_S)
        assert again is not None
        client.ack(again, clear=True)
        del again
        for seed in range(20):
            client.put("train", f"later{seed}", group(seed, 40_000))
        client.clear_partition("train")
        assert same(view, group(1, 40_000))


@on_a_loop
async def test_who_waits_for_a_service_that_goes_is_told_and_so_is_who_comes_later() -> None:
    server = QueueServer(ROOMY)
    path = await server.open()
    client = await TransferQueueClient.connect(path, "rollouts")
    await client.declare("train", COLUMNS)
    claim = await waiting(client, claimed(client))
    server.close()
    with pytest.raises(ActorLost, match="rollouts"):
        await claim
    with pytest.raises(ActorLost):
        await client.stats()
    await client.close()
    with pytest.raises(ActorLost):
        SyncTransferQueueClient.connect(path, "rollouts")


def test_a_service_that_hangs_is_named_after_the_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        with pytest.raises(DeadlineExceeded, match=r"Attach of queue .* deadline of 0\.05 s"):
            SyncTransferQueueClient.connect(path, answer_s=0.05)


def test_closing_a_client_ends_the_wait_of_another_thread() -> None:
    with running() as path:
        client = SyncTransferQueueClient.connect(path)
        client.declare("train", COLUMNS)
        ends: list[Exception] = []

        def wait() -> None:
            try:
                client.claim("train", "t", deadline_s=LONG_S)
            except ActorLost as error:
                ends.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        with SyncTransferQueueClient.connect(path) as watcher:
            while not watcher.stats().queue.waits:
                pass
        client.close()
        waiter.join(LONG_S)
        assert len(ends) == 1


def test_who_speaks_another_language_is_hung_up_on_and_others_go_on() -> None:
    with running() as path, SyncTransferQueueClient.connect(path) as client:
        client.declare("train", COLUMNS)
        for noise in (LENGTH.pack(1 << 31), framed(b"\xc1"), framed(b"GET / HTTP/1.1")):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(LONG_S)
                stranger.connect(path)
                stranger.sendall(noise)
                assert stranger.recv(1) == b""
        assert client.put("train", "a", group(1)).group == "a"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_processes_of_other_users_are_not_heard() -> None:
    stranger = (
        "import socket, sys\n"
        "with socket.socket(socket.AF_UNIX) as connection:\n"
        "    connection.settimeout(20)\n"
        "    connection.connect(chr(0) + sys.argv[1])\n"
        "    print(connection.recv(1))"
    )
    with running() as path:
        finished = subprocess.run(
            ["python3", "-I", "-c", stranger, path[1:]],
            cwd="/",
            user=65_534,
            capture_output=True,
            text=True,
            check=False,
        )
    assert finished.stdout == "b''\n", finished.stderr


def test_nothing_is_left_of_a_service_but_its_name() -> None:
    with running() as path:
        assert path.startswith("\0")
        assert not (Path(tempfile.gettempdir()) / path[1:]).exists()


@given(st.lists(st.binary(max_size=200)), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    bodies: list[bytes], data: st.DataObject
) -> None:
    stream, buffer, out = b"".join(framed(body) for body in bodies), frames(), list[bytes]()
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        buffer.feed(stream[:cut])
        while (frame := buffer.next()) is not None:
            out.append(frame[1])
        stream = stream[cut:]
    assert out == bodies
