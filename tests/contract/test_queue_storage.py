"""How payloads rest and travel: the same promises through shared memory and inside the messages."""

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.storage.arenas import MOST_MAPPED, ArenaAllocator, Reader, Slot
from offbeat.queue_service.wire import Put, WirePayload, value_of
from offbeat.transfer_queue.codec import Columns, Ragged
from tests.support.queue_service import (
    ADVANTAGES,
    COLUMNS,
    group,
    memory_falls_to,
    program,
    running,
    same,
)

SMALL, LARGE = 8, 40_000  # tokens: inside the messages, and beyond what goes there on a node
PAGES = 2 << 20
ATTEMPTS = itertools.count(1)  # the groups of all tests bear the same names


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with running() as path:
        yield path


@pytest.fixture(params=["shared memory", "messages"])
def client(request: pytest.FixtureRequest, path: str) -> Iterator[SyncTransferQueueClient]:
    with SyncTransferQueueClient.connect(path, maps=request.param == "shared memory") as client:
        client.declare("train", (*COLUMNS, ADVANTAGES))
        yield client
        client.clear_partition("train")


def put_and_claim(client: SyncTransferQueueClient, *groups: Columns) -> Columns:
    for number, columns in enumerate(groups):
        client.put("train", f"g{number}", columns, attempt=next(ATTEMPTS))
    lease = client.claim("train", "t", len(groups))
    assert lease is not None
    columns = client.get(lease)
    client.ack(lease, clear=True)
    return columns


@pytest.mark.parametrize("tokens", [SMALL, LARGE])
def test_what_is_read_is_what_was_put(client: SyncTransferQueueClient, tokens: int) -> None:
    columns = group(1, tokens)
    assert same(put_and_claim(client, columns), columns)


@pytest.mark.parametrize("tokens", [SMALL, LARGE])
def test_the_arrays_of_a_put_are_the_callers_again(
    client: SyncTransferQueueClient, tokens: int
) -> None:
    columns = group(2, tokens)
    ids = columns["ids"]
    assert isinstance(ids, np.ndarray)
    client.put("train", "g", columns, attempt=next(ATTEMPTS))
    ids[:] = 0
    lease = client.claim("train", "t")
    assert lease is not None
    assert same(client.get(lease), group(2, tokens))
    client.ack(lease)


def test_several_groups_are_read_as_one_in_order(client: SyncTransferQueueClient) -> None:
    got = put_and_claim(client, group(3, 8), group(4, 8))
    text = got["text"]
    assert isinstance(text, list)
    assert [row["seed"] for row in text] == [3] * 4 + [4] * 4
    ids = got["ids"]
    assert isinstance(ids, np.ndarray)
    assert ids.shape == (8, 8)


@pytest.mark.parametrize("tokens", [SMALL, LARGE])
def test_a_view_stays_as_it_is_whatever_becomes_of_the_group(
    client: SyncTransferQueueClient, tokens: int
) -> None:
    view = put_and_claim(client, group(5, tokens))
    for seed in range(20):  # whoever took the memory too early would be overwritten here
        put_and_claim(client, group(100 + seed, tokens))
    assert same(view, group(5, tokens))


def test_views_cannot_be_written_to(client: SyncTransferQueueClient) -> None:
    for tokens in (SMALL, LARGE):
        ids = put_and_claim(client, group(6, tokens))["ids"]
        assert isinstance(ids, np.ndarray)
        assert not ids.flags.writeable


def test_memory_is_free_once_the_group_is_cleared_and_nobody_views_it(
    client: SyncTransferQueueClient,
) -> None:
    before = client.stats().arena_bytes
    view = put_and_claim(client, group(7, LARGE))
    ids = view["ids"]
    del view
    held = client.stats()
    assert held.queue.nbytes == 0
    if client.maps:
        assert held.arena_bytes > before
    del ids
    assert memory_falls_to(client, before)


def test_columns_written_later_and_in_pieces_are_read_whole(
    client: SyncTransferQueueClient,
) -> None:
    receipt = client.put("train", "late", group(8), attempt=next(ATTEMPTS))
    client.add_columns(receipt, {"advantages": np.array([3, 4], np.float32)}, slice(2, 4))
    assert client.claim("train", "trainer", columns=("advantages",)) is None
    client.add_columns(receipt, {"advantages": np.array([1, 2], np.float32)}, slice(0, 2))
    lease = client.claim("train", "trainer", columns=("advantages",))
    assert lease is not None
    got = client.get(lease, ["advantages", "ids"])
    assert list(got) == ["advantages", "ids"]
    assert np.asarray(got["advantages"]).tolist() == [1, 2, 3, 4]
    client.ack(lease, clear=True)


def test_a_payload_survives_the_process_that_put_it(
    client: SyncTransferQueueClient, path: str
) -> None:
    attempt = next(ATTEMPTS)
    body = f"c.put('train', 'orphan', group(9, {LARGE}), attempt={attempt})"
    with program(path, body) as producer:
        producer.kill()
        producer.wait()
        lease = client.claim("train", "t", deadline_s=10)
    assert lease is not None
    assert same(client.get(lease), group(9, LARGE))
    client.ack(lease, clear=True)


def test_rows_without_a_value_are_rows() -> None:
    columns = {
        "logprobs": Ragged(np.empty(0, np.float32), np.zeros(4, np.int64)),
        "ids": np.zeros((3, 0), np.int64),
    }
    with running() as path, SyncTransferQueueClient.connect(path) as client:
        client.declare("train", COLUMNS)
        assert same(put_and_claim(client, columns), columns)


def arenas() -> int:
    """That this process has open."""
    gc.collect()  # what earlier tests left is no part of this one
    files = [file for file in Path("/proc/self/fd").iterdir() if file.exists()]
    return len({file.stat().st_ino for file in files if "offbeat" in str(file.readlink())})


def test_a_stream_of_puts_uses_the_same_memory_again() -> None:
    before = arenas()
    with running() as path, SyncTransferQueueClient.connect(path) as client:
        client.declare("train", COLUMNS)
        for seed in range(200):  # 256 MB in all
            put_and_claim(client, group(seed, LARGE))
        assert arenas() - before <= 2  # the probe, and one of 64 MB
    assert arenas() == before


def test_producers_that_come_and_go_take_a_reader_no_more_than_so_many_files() -> None:
    before = arenas()
    keeper, reader = ArenaAllocator(), Reader(lambda _slot, _nbytes: None)
    first = keeper.make("producer", 1)
    view = reader.view(first, Slot(first.id, 0), 4096)
    for number in range(2 * MOST_MAPPED):
        arena = keeper.make(f"producer {number}", 1)
        reader.view(arena, Slot(arena.id, 0), 4096)
        keeper.producer_gone(f"producer {number}")
    keeper.close()
    assert arenas() - before == MOST_MAPPED + 1  # that of the view
    assert view.tobytes() == bytes(4096)
    del view
    reader.close()
    assert arenas() == before


def test_a_slot_that_was_not_lent_is_refused(path: str) -> None:
    with SyncTransferQueueClient.connect(path) as client:
        client.declare("train", (*COLUMNS, ADVANTAGES))
        stolen = WirePayload(b"", PAGES, None, Slot(1, 0))
        op = Put("train", "x", 0, 4, b"\x90", {}, PAGES, stolen, 0.0)
        with pytest.raises(SchemaError, match="lent to client"):
            value_of(op, client.link.exchange(op, (), 0.0))
