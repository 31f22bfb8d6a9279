"""The canary of a release on a vLLM engine: what it lets pass, and what becomes of the rest."""

import asyncio

import msgspec
import pytest
from releases import CHUNK_BYTES, Weights, canary_of, released, weights
from shared_engine import FENCE, Shared, TakenOver, ask, load

from offbeat.messages.failures import CanaryFailed, EngineUnavailable
from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.canary import TOLERANCE_FLOAT32
from tests.support.plain_modules import ModuleSource

LONG = 400  # tokens: it runs when the weights come


def with_old_head(old: Weights, new: Weights) -> WeightRelease:
    """The bytes of the new weights but for the output head, under the new weights' canary.

    An engine that takes it whole is where one is whose head was tied, and is no more.
    """
    own, older = new.model.get_output_embeddings(), old.model.get_output_embeddings()
    assert own is not None and older is not None
    head = own.weight
    kept = head.detach().clone()
    head.data.copy_(older.weight)
    source = ModuleSource(new.model, CHUNK_BYTES)
    chunks = [chunk.copy() for chunk, _ in source.chunks()]
    head.data.copy_(kept)
    return released(new.release.version, source.manifest, chunks, canary_of(new.model))


@pytest.mark.parametrize("in_place", [False, True])
def test_an_engine_that_computes_what_the_trainer_computes_passes_with_room_to_spare(
    shared: Shared, *, in_place: bool
) -> None:
    async def story(actor: TakenOver) -> None:
        new = weights(1).release
        await load(actor, 1, weights(0).release)
        running = asyncio.create_task(ask(actor, "running", samples=4, tokens=LONG))
        await shared.tokens_of("running", 2)
        ack = await load(actor, 2, new)
        assert ack.canary_gap is not None and ack.canary_gap <= TOLERANCE_FLOAT32 / 4
        assert {len(spans) for spans in (await running).version_spans} == {2}
        shared.note(f"gap {ack.canary_gap:.2g} nats, pause {ack.pause_s * 1e3:.1f} ms")

    shared.play(story, in_place=in_place)


def test_an_engine_whose_head_stays_old_serves_nothing_until_a_good_release(
    shared: Shared,
) -> None:
    async def story(actor: TakenOver) -> None:
        wrong = with_old_head(weights(0), weights(1))
        await load(actor, 1, weights(0).release)
        running = asyncio.create_task(ask(actor, "running", samples=4, tokens=LONG))
        await shared.tokens_of("running", 2)
        with pytest.raises(CanaryFailed, match="and the trainer's is"):
            await load(actor, 2, wrong)
        with pytest.raises(EngineUnavailable):
            await running
        state = await actor.state(FENCE)
        assert (state.version, state.digest) == (None, None)
        with pytest.raises(EngineUnavailable):
            await ask(actor, "too early")
        await load(actor, 3, weights(1).release)
        healed = await ask(actor, "healed")
        assert weights(1).worst_error((2, 5, 14, 8, 17), healed) < 1e-3

    shared.play(story)


def test_a_canary_passes_while_more_samples_wait_than_the_engine_can_run(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await load(actor, 1, weights(0).release)
        most = actor.engine._limits.max_sequences  # noqa: SLF001 -- to fill it twice
        crowd = [
            asyncio.create_task(ask(actor, f"crowd-{place}", samples=most, tokens=16, seed=place))
            for place in range(2)
        ]
        await shared.tokens_of("crowd-0", 1)
        ack = await load(actor, 2, weights(1).release)
        assert ack.canary_gap is not None and ack.canary_gap <= TOLERANCE_FLOAT32
        await asyncio.gather(*crowd)

    shared.play(story)


def test_a_release_without_a_canary_is_served_without_one(shared: Shared) -> None:
    release = weights(1).release
    bare = msgspec.structs.replace(
        release, manifest=msgspec.structs.replace(release.manifest, canary=None), canary=None
    )

    async def story(actor: TakenOver) -> None:
        assert (await load(actor, 1, bare)).canary_gap is None

    shared.play(story)
