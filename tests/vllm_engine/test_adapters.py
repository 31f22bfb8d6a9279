"""Releases of adapters alone, on the real engine: it serves the base with them added."""

import asyncio
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from outcomes import FP32_NATS, is_exact, still_serves
from releases import TINY, Weights, canary_of, released
from shared_engine import PROMPT, Shared, TakenOver, ask, load, serve
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.messages.failures import WeightSyncFailed
from offbeat.messages.generation import GenerateRequest, SamplingParams
from offbeat.plugins.lora.release import merge_matrix
from offbeat.weight_sync.canary import TOLERANCE_FLOAT32
from offbeat.weight_sync.chunks import GatheredSource
from offbeat.weight_sync.manifest import Adapter
from offbeat.weight_sync.served import digest_loaded

RANK, ALPHA = 4, 8.0
LONG_PROMPT = tuple(2 + i % 60 for i in range(256))
"""Its keys and values fill blocks of vLLM's prefix cache; those of ``PROMPT`` fill none."""


def adapted(version: int, base: str, path: Path = TINY, *, b_scale: float = 0.1) -> Weights:
    """The model of the repository with adapters of this version, and the release of the adapters."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    noise, adapters = torch.Generator().manual_seed(version), dict[str, Tensor]()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                outputs, inputs = module.weight.shape
                a = 0.1 * torch.randn(RANK, inputs, generator=noise)
                b = b_scale * torch.randn(outputs, RANK, generator=noise)
                adapters |= {
                    f"base_model.model.{name}.lora_A.weight": a,
                    f"base_model.model.{name}.lora_B.weight": b,
                }
                module.weight.copy_(merge_matrix(module.weight, a, b, ALPHA / RANK))
    metas = [(name, tuple(each.shape), "float32") for name, each in adapters.items()]
    how = Adapter(base, RANK, ALPHA, "lora")
    source = GatheredSource(metas, lambda: iter(adapters.items()), 50_000, adapter=how)
    chunks = [chunk.copy() for chunk, _ in source.chunks()]
    return Weights(model, released(version, source.manifest, chunks, canary_of(model)))


@pytest.fixture(scope="module")
def base(shared: Shared) -> str:
    """Digest of the model that the adapters are of."""
    return digest_loaded(shared.spec.model.path)


async def serve_adapters(actor: TakenOver, base: str, epoch: int, version: int) -> Weights:
    """Have it take adapters, which its canaries agree to; the weights that it serves then."""
    served = adapted(version, base)
    ack = await load(actor, epoch, served.release)
    assert (ack.version, ack.digest) == (version, served.release.digest)
    assert ack.canary_gap is not None
    assert ack.canary_gap <= TOLERANCE_FLOAT32
    return served


def test_an_engine_serves_each_release_of_adapters_with_the_logprobs_of_the_trainer(
    shared: Shared, base: str
) -> None:
    async def story(actor: TakenOver) -> None:
        for epoch, version in enumerate((1, 2, 1), start=1):
            await is_exact(actor, await serve_adapters(actor, base, epoch, version), version)
        # A full release goes into the same engine, and adapters after it.
        await is_exact(actor, await serve(actor, 4, 3), 3)
        await is_exact(actor, await serve_adapters(actor, base, 5, 2), 2)

    shared.play(story)


def test_a_prompt_in_the_prefix_cache_is_not_answered_with_the_adapters_of_before(
    shared: Shared, base: str
) -> None:
    """vLLM's LoRA path keys the cache by the adapter's name: it would read those of older weights."""

    async def story(actor: TakenOver) -> None:
        for epoch, version in enumerate((1, 2, 1), start=1):
            served = await serve_adapters(actor, base, epoch, version)
            for turn in range(2):  # the second finds the blocks of the first
                sampling = SamplingParams(max_new_tokens=8, seed=1)
                request = GenerateRequest(f"{epoch}-{turn}", LONG_PROMPT, 2, sampling)
                result = await actor.generate(request)
                assert served.worst_error(LONG_PROMPT, result) < FP32_NATS

    shared.play(story, pause="keep", kv="keep")


def test_adapters_of_zeros_are_the_base_bit_for_bit_beside_samples_that_run_over_the_swap(
    shared: Shared, base: str
) -> None:
    """vLLM's LoRA path on a CPU computes a request of the base with the adapter of its neighbour."""

    async def story(actor: TakenOver) -> None:
        plain = await serve(actor, 1, 0)
        wanted = await ask(actor, "base")
        first, zeros = await serve_adapters(actor, base, 2, 1), adapted(2, base, b_scale=0.0)
        running = asyncio.ensure_future(ask(actor, "running", samples=4, tokens=400))
        await shared.tokens_of("running", at_least=20)
        await load(actor, 3, zeros.release)
        beside = await ask(actor, "beside")
        assert plain.worst_error(PROMPT, beside) < FP32_NATS
        over = await running
        by_first, by_base = first.errors(PROMPT, over), plain.errors(PROMPT, over)
        for spans, older, newer in zip(over.version_spans, by_first, by_base, strict=True):
            assert [version for version, _ in spans] == [1, 2]
            swap = spans[0][1]
            assert max(np.abs(older[:swap]).max(), np.abs(newer[swap:]).max()) < FP32_NATS
        alone = await ask(actor, "alone")
        assert alone.token_ids.tolist() == wanted.token_ids.tolist()
        assert alone.logprobs.tolist() == wanted.logprobs.tolist()

    shared.play(story, pause="keep", kv="recompute")


def test_adapters_that_return_after_eleven_others_are_served_as_the_first_time(
    shared: Shared, base: str
) -> None:
    """vLLM's LoRA path evicts: a request for adapters that are gone ends the service there."""

    async def story(actor: TakenOver) -> None:
        answers = list[tuple[list[int], list[float]]]()
        for epoch, version in enumerate((*range(1, 13), 1), start=1):
            served = await serve_adapters(actor, base, epoch, version)
            result = await ask(actor)
            assert served.worst_error(PROMPT, result) < FP32_NATS
            answers.append((result.token_ids.tolist(), result.logprobs.tolist()))
        assert answers[-1] == answers[0]
        assert all(one != other for one, other in pairwise(answers))

    shared.play(story)


def test_adapters_of_another_base_are_refused_and_the_old_version_goes_on(
    shared: Shared, base: str
) -> None:
    async def story(actor: TakenOver) -> None:
        served = await serve_adapters(actor, base, 1, 1)
        with pytest.raises(WeightSyncFailed, match="base of the adapters"):
            await load(actor, 2, adapted(2, "another").release)
        await still_serves(actor, served, 1)

    shared.play(story)


def test_a_release_whose_digest_is_another_is_refused(shared: Shared, base: str) -> None:
    async def story(actor: TakenOver) -> None:
        served = await serve_adapters(actor, base, 1, 1)
        other = msgspec.structs.replace(served.release, digest="0" * 32)
        with pytest.raises(WeightSyncFailed, match="digest"):
            await load(actor, 2, other)
        await still_serves(actor, served, 1)

    shared.play(story)
