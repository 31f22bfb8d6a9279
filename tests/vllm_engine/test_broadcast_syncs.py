"""``sync.transport: gloo`` into a vLLM engine: exact, and whole or not at all."""

import asyncio
import multiprocessing as mp
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext

import pytest
from broadcasting import Packed, doomed_trainer, sender_of
from outcomes import is_exact, still_serves
from releases import weights
from shared_engine import FENCE, NAME, Shared, TakenOver, serve

from offbeat.messages.failures import WeightSyncFailed
from offbeat.messages.weights import WeightsAck
from offbeat.weight_sync.transport import PublishedRelease
from offbeat.weight_sync.transports.gloo_sender import GlooSender

CHUNKS = len(weights(1).release.chunks)


@pytest.fixture
def source() -> Packed:
    return Packed(weights(0).release)


@pytest.fixture
def sender(source: Packed) -> Iterator[GlooSender]:
    made = sender_of(source)
    yield made
    made.close()


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """New ones cost milliseconds: the server has imported torch."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["offbeat.weight_sync.transports.gloo_sender"])
    return context


async def receive(
    actor: TakenOver, epoch: int, version: int, release: PublishedRelease
) -> WeightsAck:
    """As the controller's adapter calls it for a broadcast."""
    manifest, digest, (route,), *_ = release
    return await actor.receive_weights(FENCE, epoch, version, digest, manifest, route, (NAME,))


def test_weights_that_come_by_broadcast_give_the_trainers_logprobs(
    shared: Shared, source: Packed, sender: GlooSender
) -> None:
    async def story(actor: TakenOver) -> None:
        for epoch, version in enumerate((1, 2, 1), start=1):
            source.release = weights(version).release
            ack = await receive(actor, epoch, version, sender.publish(version))
            assert (ack.version, ack.epoch) == (version, epoch)
            await is_exact(actor, weights(version), version)

    shared.play(story)


DOOMS = [*((chunk, signal.SIGKILL) for chunk in range(CHUNKS)), (CHUNKS // 2, signal.SIGSTOP)]


def test_a_trainer_lost_at_any_chunk_of_a_broadcast_leaves_the_engine_as_it_was(
    shared: Shared, source: Packed, sender: GlooSender, processes: ForkServerContext
) -> None:
    """Killed before each chunk, and once stopped; another trainer's release heals."""

    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 1)
        for epoch, (chunk, sign) in enumerate(DOOMS, start=2):
            ours, theirs = mp.Pipe()
            asked = theirs, weights(2).release, chunk, sign
            trainer = processes.Process(target=doomed_trainer, args=asked, daemon=True)
            trainer.start()
            try:
                release: PublishedRelease = await asyncio.to_thread(ours.recv)
                await asyncio.to_thread(ours.recv)  # it is ready to be struck
                with pytest.raises(WeightSyncFailed, match=f"before chunk {chunk}"):
                    await receive(actor, epoch, 2, release)
            finally:
                trainer.kill()
                trainer.join()
            await still_serves(actor, served, 1)
        source.release = weights(3).release
        epoch = len(DOOMS) + 2
        await receive(actor, epoch, 3, sender.publish(3))
        await is_exact(actor, weights(3), 3)

    shared.play(story)
