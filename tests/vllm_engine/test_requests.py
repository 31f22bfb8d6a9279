"""What comes of a request: tokens, spans, aborts, and nothing without weights of the run."""

import asyncio
from typing import Final

import numpy as np
import pytest
from faulty_llm import FaultyLlm
from outcomes import is_exact
from releases import weights
from shared_engine import END, PROMPT, Shared, TakenOver, ask, load, refused, serve

from offbeat.messages.failures import InvalidRequest
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams

FP32_NATS: Final = 1e-4


def test_without_weights_of_the_run_nothing_is_generated(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        assert "no weights of this run" in await refused(actor)
        await serve(actor, 1, 0)
        assert (await ask(actor)).token_ids.size

    shared.play(story)


def test_a_request_is_answered_as_one_packed_group(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 0)
        result = await ask(actor, "g", samples=8, tokens=6, ends=(END,))
        lengths = np.diff(result.offsets)
        assert (result.request_id, len(result.finish_reasons)) == ("g", 8)
        assert result.offsets[-1] == len(result.token_ids) == len(result.logprobs)
        assert [sum(n for _, n in spans) for spans in result.version_spans] == lengths.tolist()
        for length, reason in zip(lengths, result.finish_reasons, strict=True):
            assert reason == ("length" if length == 6 else "stop")
            assert 1 <= length <= 6

    shared.play(story)


def test_the_end_token_is_kept_and_ends_a_sample(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 0)
        result = await ask(actor, samples=16, tokens=64, ends=(END,))
        ends = result.offsets[1:] - 1
        stopped = [r == "stop" for r in result.finish_reasons]
        assert any(stopped)
        assert [bool(t) for t in result.token_ids[ends] == END] == stopped

    shared.play(story)


def test_a_seed_gives_the_same_samples_again_and_different_ones_within_a_group(
    shared: Shared,
) -> None:
    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 1)
        one, again, other = [await ask(actor, samples=4, seed=seed) for seed in (7, 7, 8)]
        assert one.token_ids.tolist() == again.token_ids.tolist()
        assert one.token_ids.tolist() != other.token_ids.tolist()
        samples = [tuple(part) for part in np.split(one.token_ids, one.offsets[1:-1])]
        assert len(set(samples)) > 1

    shared.play(story)


def test_an_aborted_request_brings_its_partial_samples_with_their_versions(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 5)
        running = asyncio.ensure_future(ask(actor, "long", samples=8, tokens=400))
        await shared.tokens_of("long", at_least=10)
        served = await serve(actor, 2, 6)
        await shared.tokens_of("long", at_least=40)
        await shared.llm.abort(["long"])
        result = await running
        assert "abort" in result.finish_reasons
        counted = [sum(n for _, n in spans) for spans in result.version_spans]
        assert counted == np.diff(result.offsets).tolist()
        assert {v for spans in result.version_spans for v, _ in spans} == {5, 6}
        assert served.errors(PROMPT, result)[0][-1] < FP32_NATS

    shared.play(story)


def test_a_cancelled_request_leaves_the_engine(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 0)
        running = asyncio.ensure_future(ask(actor, "long", samples=8, tokens=400))
        await shared.tokens_of("long", at_least=3)
        running.cancel()
        await asyncio.wait([running])
        assert actor.engine.running == 0
        assert shared.llm.get_num_unfinished_requests() == 0
        assert (await ask(actor, "long", tokens=2)).request_id == "long"

    shared.play(story)


@pytest.mark.parametrize(
    ("prompt", "samples", "temperature"),
    [((), 1, 1.0), ((5000,), 1, 1.0), ((2,) * 600, 1, 1.0), (PROMPT, 0, 1.0), (PROMPT, 1, 0.0)],
)
def test_what_can_never_be_served_is_refused_before_it_is_sent(
    shared: Shared, prompt: tuple[int, ...], samples: int, temperature: float
) -> None:
    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 0)
        sampling = SamplingParams(temperature=temperature, max_new_tokens=4)
        with pytest.raises(InvalidRequest):
            await actor.generate(GenerateRequest("bad", prompt, samples, sampling))

    shared.play(story)


def test_a_response_never_exceeds_the_engines_window(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 1)
        request = GenerateRequest("w", (5,) * 500, 2, SamplingParams(max_new_tokens=100, seed=3))
        result = await actor.generate(request)
        assert np.diff(result.offsets).max() <= 12

    shared.play(story)


def test_the_prefix_cache_of_older_weights_is_never_read(shared: Shared) -> None:
    """With kept keys and values the cache survives a sync: only the salt keeps it apart."""

    async def story(actor: TakenOver) -> None:
        long_prompt = tuple(2 + i % 60 for i in range(256))
        for epoch, version in enumerate((5, 6, 5), start=1):
            served = await serve(actor, epoch, version)
            for turn in range(2):
                request = GenerateRequest(
                    f"{epoch}-{turn}", long_prompt, 2, SamplingParams(max_new_tokens=8, seed=1)
                )
                result = await actor.generate(request)
                assert served.worst_error(long_prompt, result) < 1e-4

    shared.play(story, pause="keep", kv="keep")


def test_requests_during_a_swap_wait_and_get_the_new_weights(shared: Shared) -> None:
    faulty = FaultyLlm(shared.llm)

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 5)
        asked = list[asyncio.Future[GenerateResult]]()

        async def paused() -> None:
            asked.append(asyncio.ensure_future(ask(actor, "during")))

        faulty.before["finish_weight_update", 0] = paused
        await load(actor, 2, weights(6).release)
        result = await asked[0]
        assert {v for spans in result.version_spans for v, _ in spans} == {6}

    shared.play(story, llm=faulty)


def test_requests_are_answered_with_the_old_weights_while_new_ones_are_prepared(
    shared: Shared,
) -> None:
    """Between two chunks: the sync goes on when the whole answer is there."""
    faulty = FaultyLlm(shared.llm)

    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 5)
        answers = list[GenerateResult]()

        async def beside() -> None:
            answers.append(await ask(actor, "meanwhile"))

        faulty.before["update_weights", 2] = beside
        await load(actor, 2, weights(6).release)
        assert {v for spans in answers[0].version_spans for v, _ in spans} == {5}
        assert served.worst_error(PROMPT, answers[0]) < FP32_NATS
        await is_exact(actor, weights(6), 6)

    shared.play(story, llm=faulty)
