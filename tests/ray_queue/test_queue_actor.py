"""The queue as a Ray actor: found by name, reached from actors, lost when it dies."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from offbeat.messages.failures import ActorLost, StartFailed
from offbeat.queue_service import ray_actor as actor
from offbeat.queue_service import ray_links
from offbeat.queue_service.clients.asyncio_client import TransferQueueClient
from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.core.records import QueueLimits
from offbeat.queue_service.errors import SnapshotFailed, UnknownPartition
from tests.support.queue_service import COLUMNS, ROOMY, group, same

pytestmark = pytest.mark.ray
LARGE = 40_000


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def queue() -> actor.Handle:
    return actor.start(ROOMY, name="rollouts")


@ray.remote(num_cpus=0)
class Producer:
    def put(self, name: str, seed: int) -> None:
        with actor.connect("rollouts") as client:
            client.put("train", name, group(seed, LARGE))

    async def put_from_a_loop(self, name: str, seed: int) -> None:
        async with await actor.connect_async("rollouts") as client:
            await client.put("train", name, group(seed, LARGE))


@pytest.mark.parametrize("method", ["put", "put_from_a_loop"])
def test_what_an_actor_puts_another_process_reads(queue: actor.Handle, method: str) -> None:
    with actor.connect(queue) as client:
        client.declare("train", COLUMNS)
        producer = Producer.remote()
        done = getattr(producer, method).remote(method, 1)
        lease = client.claim("train", "t", deadline_s=60)
        ray.get(done)
        assert lease is not None
        assert client.maps
        assert same(client.get(lease), group(1, LARGE))
        client.ack(lease, clear=True)


def test_a_client_elsewhere_sends_the_same_calls_through_ray(queue: actor.Handle) -> None:
    far = SyncTransferQueueClient.over(ray_links.BlockingRayLink(queue, "rollouts", 30.0))
    with far, actor.connect(queue) as near:
        near.declare("train", COLUMNS)
        far.put("train", "far", group(2, LARGE))
        lease = near.claim("train", "t")
        assert lease is not None
        assert same(near.get(lease), group(2, LARGE))
        near.ack(lease, clear=True)
        near.put("train", "near", group(3, LARGE))
        lease = far.claim("train", "t")
        assert lease is not None
        assert same(far.get(lease), group(3, LARGE))
        with pytest.raises(UnknownPartition):
            far.clear_partition("evil")
        far.close()
        again = near.claim("train", "t")  # what a client has that leaves goes back
        assert again is not None
        near.ack(again, clear=True)


def test_a_claim_through_ray_waits_in_the_actor_and_is_taken_back_when_cancelled(
    queue: actor.Handle,
) -> None:
    async def scenario() -> None:
        far = TransferQueueClient.over(await ray_links.LoopRayLink.connect(queue, "r", 30.0))
        near = await actor.connect_async(queue)
        await near.declare("train", COLUMNS)
        for end in ("cancel", "put"):
            claim = asyncio.create_task(far.claim("train", "t", deadline_s=30))
            while not (await near.stats()).queue.waits:
                pass
            if end == "cancel":
                claim.cancel()
                while (await near.stats()).queue.waits:
                    pass
            else:
                await near.put("train", "x", group(4))
                lease = await claim
                assert lease is not None
                await far.ack(lease, clear=True)
        await far.close()
        await near.close()

    asyncio.run(scenario())


def test_who_uses_a_queue_that_died_is_told_its_name() -> None:
    queue = actor.start(ROOMY, name="mortal")
    with actor.connect("mortal") as client:
        client.declare("train", COLUMNS)
        actor.stop(queue)
        with pytest.raises(ActorLost, match="mortal"):
            client.claim("train", "t", deadline_s=30)
    with pytest.raises(ActorLost):
        actor.connect(queue)
    with pytest.raises(ActorLost, match="never started"):
        actor.connect("never started")


def test_a_queue_is_started_from_a_snapshot_or_says_why_not(
    queue: actor.Handle, tmp_path: Path
) -> None:
    with actor.connect(queue) as client:
        client.declare("train", COLUMNS)
        client.put("train", "kept", group(5, LARGE))
        client.snapshot(str(tmp_path / "snapshot"))
        client.clear_partition("train")
    second = actor.start(ROOMY, restore_from=str(tmp_path / "snapshot"))
    with actor.connect(second) as client:
        lease = client.claim("train", "t")
        assert lease is not None
        assert same(client.get(lease), group(5, LARGE))
    actor.stop(second)
    third = actor.start(QueueLimits(1, 1), restore_from=str(tmp_path / "nothing"))
    with pytest.raises((SnapshotFailed, StartFailed), match="nothing"):
        actor.connect(third)
    actor.stop(third)
