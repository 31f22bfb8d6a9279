"""``sync.delta`` into vLLM: a release is rebuilt from what it changes, and served bit for bit."""

import msgspec
import pytest
import torch
from outcomes import FP32_NATS
from releases import CHUNK_BYTES, TINY, Weights, canary_of
from shared_engine import FENCE, PROMPT, Engine, Shared, TakenOver, ask, load
from transformers import AutoModelForCausalLM

from offbeat.messages.failures import BaseRefused
from offbeat.messages.weights import FullReason, WeightRelease, WeightsAck
from offbeat.plugins.verify_weights.legs import compare_served
from offbeat.weight_sync.object_store import ObjectStoreSender
from offbeat.weight_sync.transport import make_release, with_handles_apart
from tests.support.plain_modules import ModuleSource


class Line:
    """A trainer whose steps change one value in a hundred."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            TINY, local_files_only=True, dtype=torch.float32
        ).eval()
        self.sender = ObjectStoreSender(ModuleSource(self.model, CHUNK_BYTES), delta=True)
        self.dice = torch.Generator().manual_seed(0)
        self.version = 0

    @torch.no_grad()
    def published(self) -> WeightRelease:
        """Take a step, and publish."""
        for each in self.model.parameters():
            moved = torch.rand(each.shape, generator=self.dice) < 0.01
            each.copy_(torch.where(moved, each * 1.25 + 0.01, each))
        self.version += 1
        count, published = self.sender.delta_handles, self.sender.publish(self.version)
        manifest = msgspec.structs.replace(published.manifest, canary=canary_of(self.model))
        first, *handles = with_handles_apart(published._replace(manifest=manifest), count)
        return make_release(self.version, first, tuple(handles), count)

    async def is_served(self, actor: Engine, release: WeightRelease, ack: WeightsAck) -> None:
        """By every digest, by the bits that workers compute with, and by logprobs."""
        assert (ack.version, ack.digest) == (self.version, release.digest)
        assert ack.canary_gap is not None
        _, loaded = compare_served(await actor.served_weights(), "no checkpoint")
        assert loaded.is_equal, loaded
        result = await ask(actor, f"exact {self.version}")
        assert Weights(self.model, release).worst_error(PROMPT, result) < FP32_NATS
        assert {v for spans in result.version_spans for v, _ in spans} == {self.version}


@pytest.mark.parametrize("in_place", [False, True])
def test_an_engine_takes_changes_alone_and_serves_what_the_trainer_holds(
    shared: Shared, *, in_place: bool
) -> None:
    async def story(actor: TakenOver) -> None:
        line = Line()
        first = line.published()
        assert first.full_reason is FullReason.NO_BASE
        await line.is_served(actor, first, await load(actor, 1, first))
        for epoch in (2, 3):
            new = line.published()
            assert new.delta is not None and new.delta.nbytes < new.nbytes / 10
            await line.is_served(actor, new, await load(actor, epoch, new))

    shared.play(story, in_place=in_place, keeps_base=True)


def test_an_engine_that_serves_another_release_refuses_the_changes_and_takes_the_full_one(
    shared: Shared,
) -> None:
    async def story(actor: TakenOver) -> None:
        line = Line()
        first, skipped, new = (line.published() for _ in range(3))
        assert skipped.delta is not None
        await load(actor, 1, first)
        with pytest.raises(BaseRefused):
            await load(actor, 2, new)
        assert (await actor.state(FENCE)).version == first.version
        await line.is_served(
            actor, new, await load(actor, 3, msgspec.structs.replace(new, delta=None))
        )

    shared.play(story, keeps_base=True)
