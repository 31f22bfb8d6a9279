"""The engine's logprobs against the trainer's own computation on the same tokens."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from releases import weights
from shared_engine import PROMPT, Shared, TakenOver, ask, load, serve

from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams

FP32_NATS: Final = 1e-4
_GREEDY: Final = 0.01
_TIE_NATS: Final = 0.1
_TELLING: Final = 3  # tokens at least, for the comparison to say something


PLACES = pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])


@PLACES
def test_after_each_sync_logprobs_are_those_of_the_trainer(shared: Shared, in_place: bool) -> None:
    async def story(actor: TakenOver) -> None:
        for epoch, version in enumerate((0, 1, 2, 1, 0), start=1):
            served = await serve(actor, epoch, version)
            result = await ask(actor)
            assert served.worst_error(PROMPT, result) < FP32_NATS
            assert {v for spans in result.version_spans for v, _ in spans} == {version}

    shared.play(story, in_place=in_place)


@PLACES
def test_a_model_whose_head_is_its_embedding_is_exact_after_each_sync(
    tied: Shared, in_place: bool
) -> None:
    """It has biases, too: other loaders write them than write the weights."""

    async def story(actor: TakenOver) -> None:
        for epoch, version in enumerate((0, 1, 2, 1), start=1):
            served = weights(version, model=Path(tied.spec.model.path))
            await load(actor, epoch, served.release)
            assert served.worst_error(PROMPT, await ask(actor)) < FP32_NATS

    tied.play(story, in_place=in_place)


def test_weights_that_come_back_bring_their_logprobs_back_bit_for_bit(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        results = []
        for epoch, version in enumerate((3, 4, 3), start=1):
            await serve(actor, epoch, version)
            results.append(await ask(actor, samples=1))
        first, between, again = results
        assert first.token_ids.tolist() == again.token_ids.tolist()
        assert first.logprobs.tolist() == again.logprobs.tolist()
        assert first.logprobs.tolist() != between.logprobs.tolist()

    shared.play(story)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_logprobs_are_of_the_distribution_that_was_drawn_from(
    shared: Shared, temperature: float
) -> None:
    """An engine of another temperature computes others: the raw ones are of temperature 1."""

    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 0)
        result = await ask(actor, temperature=temperature)
        assert served.worst_error(PROMPT, result) < FP32_NATS

    shared.play(story)  # the shared engine is of temperature 1, so these are raw


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=str)
def test_a_filter_changes_what_vllm_draws_and_not_its_logprobs(
    shared: Shared, filters: dict[str, Any]
) -> None:
    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 0)
        result = await ask(actor, **filters)
        assert served.worst_error(PROMPT, result) < FP32_NATS
        assert result.logprobs.min() < -0.1, "of the filtered distribution each would be 0"
        first, *others = np.split(result.token_ids, result.offsets[1:-1])
        assert all(other.tolist() == first.tolist() for other in others)

    shared.play(story)


Errors = NDArray[np.float32]


@dataclass(frozen=True)
class Swapped:
    """Samples that ran while version 5 was swapped for 6."""

    old: Errors  # in nats, of the tokens of version 5 against its own model
    new: Errors
    result: GenerateResult

    @property
    def versions(self) -> set[int]:
        return {v for sample in self.result.version_spans for v, _ in sample}


def errors_of(version: int, result: GenerateResult) -> Errors:
    """Absolute errors of the tokens that were drawn under this version."""
    found = [np.empty(0, np.float32)]
    errors = weights(version).errors(PROMPT, result)
    for gaps, sample in zip(errors, result.version_spans, strict=True):
        at = 0
        for stamped, count in sample:
            found += [np.abs(gaps[at : at + count])] if stamped == version else []
            at += count
    return np.concatenate(found)


async def swapped_in_flight(shared: Shared, actor: TakenOver) -> Swapped:
    await serve(actor, 1, 5)
    running = asyncio.ensure_future(ask(actor, "long", samples=4, tokens=300))
    await shared.tokens_of("long", at_least=20)
    await serve(actor, 2, 6)
    result = await running
    return Swapped(errors_of(5, result), errors_of(6, result), result)


@PLACES
def test_with_recomputed_keys_and_values_running_samples_go_on_exactly(
    shared: Shared, in_place: bool
) -> None:
    async def story(actor: TakenOver) -> None:
        swapped = await swapped_in_flight(shared, actor)
        assert swapped.versions == {5, 6}
        assert max(swapped.old.max(), swapped.new.max()) < FP32_NATS
        assert swapped.result.kept_kv == ()

    shared.play(story, in_place=in_place, pause="keep", kv="recompute")


def test_with_kept_keys_and_values_the_tokens_after_the_swap_are_off_and_say_so(
    shared: Shared,
) -> None:
    async def story(actor: TakenOver) -> None:
        swapped = await swapped_in_flight(shared, actor)
        assert swapped.versions == {5, 6}
        assert swapped.old.max() < FP32_NATS
        assert swapped.new.mean() > 10 * FP32_NATS
        assert sum(swapped.result.kept_kv) == swapped.new.size
        shared.note(f"kept keys and values: {swapped.new.mean():.3f} nats off on average")

    shared.play(story, pause="keep", kv="keep")


@pytest.mark.parametrize(("pause", "versions"), [("keep", {5, 6}), ("wait", {5}), ("abort", {6})])
def test_whatever_a_sync_does_to_running_samples_each_token_is_of_the_version_it_says(
    shared: Shared, pause: str, versions: set[int]
) -> None:
    async def story(actor: TakenOver) -> None:
        swapped = await swapped_in_flight(shared, actor)
        assert swapped.versions == versions
        assert max(swapped.old.max(initial=0), swapped.new.max(initial=0)) < FP32_NATS

    shared.play(story, pause=pause, kv="recompute")


def test_greedy_samples_go_on_after_a_swap_as_from_a_fresh_prompt(shared: Shared) -> None:
    """``recompute``: what was there is prefilled anew, so the continuation is the same tokens.

    Of several prompts: where a sample is when the swap comes is chance, and so is a tie behind it.
    """

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 5)
        prompts = {f"long {first}": (first, *PROMPT) for first in range(3, 9)}
        greedy = SamplingParams(_GREEDY, 1.0, 200, (), 1)
        running = [
            asyncio.ensure_future(actor.generate(GenerateRequest(id_, prompt, 1, greedy)))
            for id_, prompt in prompts.items()
        ]
        for id_ in prompts:
            await shared.tokens_of(id_, at_least=20)
        await serve(actor, 2, 6)
        told = 0
        for result in await asyncio.gather(*running):
            prompt, tokens = prompts[result.request_id], result.token_ids.tolist()
            ((_, old), (_, new)) = result.version_spans[0]
            sampling = SamplingParams(_GREEDY, 1.0, new, (), 1)
            fresh = GenerateRequest("fresh", (*prompt, *tokens[:old]), 1, sampling)
            again = (await actor.generate(fresh)).token_ids.tolist()
            clear = tokens_without_a_tie(6, [*prompt, *tokens], len(prompt) + old)
            assert again[:clear] == tokens[old : old + clear]
            told = max(told, clear)
        assert told >= _TELLING

    shared.play(story, pause="keep", kv="recompute")


def tokens_without_a_tie(version: int, tokens: list[int], start: int) -> int:
    """How many tokens from ``start`` on had one clear favourite: after a tie two runs may part."""
    with torch.no_grad():
        logits = weights(version).model(torch.tensor([tokens])).logits[0, start - 1 : -1]
    best, second = logits.topk(2).values.T
    ties = (best - second < _TIE_NATS).nonzero()
    return int(ties[0]) if len(ties) else len(logits)
