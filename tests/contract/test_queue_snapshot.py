"""A queue that is written to disk, and comes back."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.errors import SnapshotFailed
from offbeat.transfer_queue.errors import StaleHandle
from tests.support.queue_service import COLUMNS, group, running, same

TOKENS = (8, 40_000)  # inside the messages, and in shared memory


@pytest.fixture
def client() -> Iterator[SyncTransferQueueClient]:
    with running() as path, SyncTransferQueueClient.connect(path) as client:
        client.declare("train", COLUMNS)
        yield client


def fill(client: SyncTransferQueueClient, groups: int = 6) -> None:
    for i in range(groups):
        client.put("train", f"g{i}", group(i, TOKENS[i % 2]), {"reward": [float(i)] * 4})


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_what_was_ready_leased_and_acked_comes_back_as_it_was_or_ready(
    client: SyncTransferQueueClient, tmp_path: Path
) -> None:
    fill(client)
    acked, leased = client.claim("train", "t", 1), client.claim("train", "t", 2)
    assert acked is not None
    assert leased is not None
    client.ack(acked)
    assert client.snapshot(str(tmp_path / "queue")) == 6
    with (
        running(restore_from=str(tmp_path / "queue")) as path,
        SyncTransferQueueClient.connect(path) as restored,
    ):
        lease = restored.claim("train", "t", 6, at_least=1)
        assert lease is not None
        assert [receipt.group for receipt in lease.receipts] == ["g1", "g2", "g3", "g4", "g5"]
        for i, columns in enumerate(restored.get_each(lease), start=1):
            assert same(columns, group(i, TOKENS[i % 2]))
            assert lease.receipts[i - 1].tags == {"reward": (float(i),) * 4}
        restored.ack(lease, clear=True)
        with pytest.raises(StaleHandle):  # handles go on meaning what they meant
            restored.put("train", "g1", group(1), attempt=-1)


def test_a_payload_that_does_not_verify_is_a_lost_group_and_the_rest_is_there(
    client: SyncTransferQueueClient, tmp_path: Path
) -> None:
    fill(client)
    client.snapshot(str(tmp_path / "queue"))
    damage(tmp_path / "queue" / "payloads-0000.bin", 200)
    with (
        running(restore_from=str(tmp_path / "queue")) as path,
        SyncTransferQueueClient.connect(path) as restored,
    ):
        assert [(lost.group, lost.reason) for lost in restored.take_lost("train")] == [
            ("g0", "not restored: payloads-0000.bin is damaged at byte 0")
        ]
        assert restored.stats().queue.groups == 5
        assert restored.put("train", "g0", group(0), attempt=1).attempt == 1


@pytest.mark.parametrize("name", ["index.msgpack", "manifest.json"])
def test_an_index_that_does_not_verify_is_refused(
    client: SyncTransferQueueClient, tmp_path: Path, name: str
) -> None:
    fill(client)
    client.snapshot(str(tmp_path / "queue"))
    damage(tmp_path / "queue" / name, 60)
    with pytest.raises(SnapshotFailed), running(restore_from=str(tmp_path / "queue")):
        pass


def test_there_is_nothing_to_restore_where_nothing_was_written(tmp_path: Path) -> None:
    with pytest.raises(SnapshotFailed), running(restore_from=str(tmp_path)):
        pass


def test_a_snapshot_taken_in_full_traffic_is_of_one_moment(
    client: SyncTransferQueueClient, tmp_path: Path
) -> None:
    """Groups are put in order and cleared in order, so those of one moment have no gap."""
    stop = threading.Event()

    def put(i: int) -> None:
        client.put("train", f"{i}", group(i % 7, 20_000))

    def traffic() -> None:
        for i in itertools.count(20):
            if stop.is_set():
                return
            put(i)
            lease = client.claim("train", "t")
            assert lease is not None
            client.ack(lease, clear=True)

    for i in range(20):
        put(i)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        for number in range(3):
            client.snapshot(str(tmp_path / f"queue{number}"))
    finally:
        stop.set()
        thread.join()
    for number in range(3):
        with (
            running(restore_from=str(tmp_path / f"queue{number}")) as path,
            SyncTransferQueueClient.connect(path) as restored,
        ):
            assert restored.take_lost("train") == []
            lease = restored.claim("train", "t", 1000, at_least=20)
            assert lease is not None
            numbers = [int(receipt.group) for receipt in lease.receipts]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            for i, columns in zip(numbers, restored.get_each(lease), strict=True):
                assert same(columns, group(i % 7, 20_000))


def test_a_newer_snapshot_takes_the_place_of_the_older(
    client: SyncTransferQueueClient, tmp_path: Path
) -> None:
    fill(client, 2)
    client.snapshot(str(tmp_path / "queue"))
    fill(client, 4)
    client.snapshot(str(tmp_path / "queue"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["queue"]
    with (
        running(restore_from=str(tmp_path / "queue")) as path,
        SyncTransferQueueClient.connect(path) as restored,
    ):
        assert restored.stats().queue.groups == 4


def test_a_snapshot_that_fails_leaves_the_older_one(
    client: SyncTransferQueueClient, tmp_path: Path
) -> None:
    fill(client, 2)
    client.snapshot(str(tmp_path / "queue"))
    (tmp_path / "queue.writing").write_text("in the way")
    with pytest.raises(SnapshotFailed, match=r"queue\.writing"):
        client.snapshot(str(tmp_path / "queue"))
    with running(restore_from=str(tmp_path / "queue")):
        pass


def test_a_crash_between_the_two_renames_loses_nothing(
    client: SyncTransferQueueClient, tmp_path: Path
) -> None:
    fill(client, 2)
    client.snapshot(str(tmp_path / "queue"))
    (tmp_path / "queue").rename(tmp_path / "queue.old")
    with (
        running(restore_from=str(tmp_path / "queue")) as path,
        SyncTransferQueueClient.connect(path) as restored,
    ):
        assert restored.stats().queue.groups == 2


def test_a_directory_that_holds_something_else_is_left_alone(
    client: SyncTransferQueueClient, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(SnapshotFailed, match="holds other files"):
        client.snapshot(str(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_payload_memory_is_free_again_after_a_snapshot(
    client: SyncTransferQueueClient, tmp_path: Path
) -> None:
    fill(client)
    client.snapshot(str(tmp_path / "queue"))
    client.clear_partition("train")
    assert client.stats().arena_bytes == 0
