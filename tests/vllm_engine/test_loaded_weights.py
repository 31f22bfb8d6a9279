"""A vLLM engine that serves what it loaded itself, for evaluations without a trainer."""

import pytest
from releases import weights
from shared_engine import Shared, TakenOver, ask, load

from offbeat.messages.failures import WeightSyncFailed
from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.served import digest_loaded


def initial(version: int, digest: str = "") -> WeightRelease:
    """The release of a run that has no trainer."""
    return WeightRelease(version, digest, manifest=None, chunks=(), nbytes=0)


def test_what_was_loaded_is_served_under_the_version_that_the_controller_names(
    shared: Shared,
) -> None:
    async def story(actor: TakenOver) -> None:
        digest = digest_loaded(shared.spec.model.path)
        ack = await load(actor, 1, initial(0, digest))
        assert (ack.version, ack.digest) == (0, digest)
        answered = await ask(actor, "asked", samples=2, tokens=5)
        assert answered.version_spans == (((0, 5),), ((0, 5),))

    shared.play(story)


def test_loaded_weights_are_not_served_once_a_release_was_begun(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await load(actor, 1, weights(0).release)
        with pytest.raises(WeightSyncFailed, match="loaded weights"):
            await load(actor, 2, initial(1))
        actor._version = None  # noqa: SLF001 -- as after a transfer that failed half-way
        with pytest.raises(WeightSyncFailed, match="as loaded"):
            await load(actor, 3, initial(1))

    shared.play(story)
