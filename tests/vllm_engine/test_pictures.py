"""Prompts with pictures: the values of a request reach the tower that vLLM serves."""

import asyncio
from typing import Final

import msgspec
import numpy as np
import pytest
import transformers
from pictured import digits_of, pictured, worst_error
from shared_engine import Shared, TakenOver, load, serve

from offbeat.environments.protocol import EncodedPrompt
from offbeat.messages.failures import CanaryFailed, InvalidRequest
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.plugins.images.pictures import Pictures

pytestmark = pytest.mark.skipif(
    getattr(transformers.Idefics3ImageProcessorPil, "is_dummy", False),
    reason="this transformers loads the processor of Idefics3 only with torchvision",
)

FP32_NATS: Final = 1e-5
PLACEHOLDER: Final = 5
BEHIND: Final = (88, PLACEHOLDER, 88)

PLACES = pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])


async def ask(
    actor: TakenOver,
    prompt: EncodedPrompt,
    id_: str = "r",
    *,
    behind: tuple[int, ...] = (),
    tokens: int = 12,
) -> GenerateResult:
    sampling = SamplingParams(1.0, 1.0, tokens, (), 1)
    ids = (*prompt.token_ids, *behind)
    return await actor.generate(GenerateRequest(id_, ids, 4, sampling, media=prompt.media))


@PLACES
def test_after_each_sync_logprobs_behind_pictures_are_those_of_the_trainer(
    digits: Shared, in_place: bool
) -> None:
    async def story(actor: TakenOver) -> None:
        for epoch, version in enumerate((0, 1, 2, 1), start=1):
            served = pictured(version)
            ack = await load(actor, epoch, served.release)
            assert ack.canary_gap is not None and ack.canary_gap < FP32_NATS
            for prompt in (digits_of(3), digits_of(4), digits_of(4, 3, 4)):
                error = worst_error(served.model, prompt, await ask(actor, prompt))
                digits.note(f"version {version}: {error:.2g} nats")
                assert error < FP32_NATS

    digits.play(story, in_place=in_place)


def test_what_is_cached_of_a_picture_is_never_read_with_other_weights(digits: Shared) -> None:
    """With kept keys and values the caches survive a sync: only the salt keeps them apart."""

    async def story(actor: TakenOver) -> None:
        for epoch, version in enumerate((1, 2, 1), start=1):
            served = pictured(version)
            await load(actor, epoch, served.release)
            for turn in range(2):
                result = await ask(actor, digits_of(3), f"{epoch}-{turn}")
                assert worst_error(served.model, digits_of(3), result) < FP32_NATS

    digits.play(story, pause="keep", kv="keep")


def test_samples_behind_pictures_go_on_exactly_after_a_swap(digits: Shared) -> None:
    """Their features are computed anew, by the new tower."""

    async def story(actor: TakenOver) -> None:
        await load(actor, 1, pictured(1).release)
        running = asyncio.ensure_future(ask(actor, digits_of(3, 4), "long", tokens=300))
        await digits.tokens_of("long", at_least=20)
        await load(actor, 2, pictured(2).release)
        result = await running
        at = 0
        for spans, end in zip(result.version_spans, result.offsets[1:].tolist(), strict=True):
            (first, before), (second, after) = spans
            assert (first, second) == (1, 2)
            ids = tuple(result.token_ids[at : at + before].tolist())
            later = _part(result, at + before, end)
            earlier = _part(result, at, at + before)
            assert worst_error(pictured(1).model, digits_of(3, 4), earlier) < FP32_NATS
            assert worst_error(pictured(2).model, digits_of(3, 4), later, ids) < FP32_NATS
            assert after > 0
            at = end

    digits.play(story, pause="keep", kv="recompute")


def _part(result: GenerateResult, start: int, end: int) -> GenerateResult:
    """One sample of these tokens."""
    return msgspec.structs.replace(
        result,
        token_ids=result.token_ids[start:end],
        logprobs=result.logprobs[start:end],
        offsets=np.array([0, end - start]),
    )


def test_a_placeholder_behind_the_pictures_is_an_ordinary_token(digits: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await load(actor, 1, pictured(1).release)
        result = await ask(actor, digits_of(3), behind=BEHIND)
        assert worst_error(pictured(1).model, digits_of(3), result, BEHIND) < FP32_NATS

    digits.play(story)


@pytest.mark.parametrize("part", ["model.vision_model", "model.connector"])
def test_a_release_that_leaves_a_part_of_the_tower_old_is_not_served(
    digits: Shared, part: str
) -> None:
    async def story(actor: TakenOver) -> None:
        with pytest.raises(CanaryFailed):
            await load(actor, 1, pictured(1, stale=part).release)
        await load(actor, 2, pictured(1).release)
        result = await ask(actor, digits_of(3))
        assert worst_error(pictured(1).model, digits_of(3), result) < FP32_NATS

    digits.play(story)


def test_pictures_that_the_model_does_not_read_are_refused_before_they_are_sent(
    digits: Shared,
) -> None:
    one = digits_of(3)
    assert one.media is not None
    given = Pictures.of(one.media)
    small = Pictures(
        given.kind, given.values[: 3 * 16 * 16], given.sizes // np.array([1, 2, 2], np.int32)
    ).media

    async def story(actor: TakenOver) -> None:
        await load(actor, 1, pictured(0).release)
        with pytest.raises(InvalidRequest, match="the model reads"):
            await ask(actor, EncodedPrompt(one.token_ids, small))
        with pytest.raises(InvalidRequest, match="its pictures take 8"):
            await ask(actor, EncodedPrompt(one.token_ids, digits_of(3, 4).media))

    digits.play(story)


def test_pictures_are_refused_by_an_engine_of_a_model_of_text(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 0)
        with pytest.raises(InvalidRequest, match="the model reads only text"):
            await ask(actor, EncodedPrompt((2, 5), digits_of(3).media))

    shared.play(story)
