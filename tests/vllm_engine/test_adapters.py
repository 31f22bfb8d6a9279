"""Releases of adapters alone, on the real engine: it serves the base with them added."""

from pathlib import Path

import msgspec
import pytest
import torch
from releases import TINY, Weights, canary_of, released, weights
from shared_engine import PROMPT, Shared, TakenOver, ask, load
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.messages.failures import WeightSyncFailed
from offbeat.weight_sync.adapter import merged
from offbeat.weight_sync.loaded_weights import loaded_digest
from offbeat.weight_sync.manifest import Adapter
from offbeat.weight_sync.source import GatheredSource

FP32_NATS = 1e-4
RANK, ALPHA = 4, 8.0


def adapted(version: int, base: str, path: Path = TINY) -> Weights:
    """The model of the repository with adapters of this version, and the release of the adapters."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    noise, adapters = torch.Generator().manual_seed(version), dict[str, Tensor]()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                outputs, inputs = module.weight.shape
                a = 0.1 * torch.randn(RANK, inputs, generator=noise)
                b = 0.1 * torch.randn(outputs, RANK, generator=noise)
                adapters |= {
                    f"base_model.model.{name}.lora_A.weight": a,
                    f"base_model.model.{name}.lora_B.weight": b,
                }
                module.weight.copy_(merged(module.weight, a, b, ALPHA / RANK))
    metas = [(name, tuple(each.shape), "float32") for name, each in adapters.items()]
    how = Adapter(base, RANK, ALPHA)
    source = GatheredSource(metas, lambda: iter(adapters.items()), 50_000, adapter=how)
    chunks = [chunk.copy() for chunk, _ in source.chunks()]
    return Weights(model, released(version, source.manifest, chunks, canary_of(model)))


def test_an_engine_serves_each_release_of_adapters_with_the_logprobs_of_the_trainer(
    shared: Shared,
) -> None:
    async def story(actor: TakenOver) -> None:
        base = loaded_digest(shared.spec.model.path)
        for epoch, version in enumerate((1, 2, 1), start=1):
            served = adapted(version, base)
            ack = await load(actor, epoch, served.release)
            assert (ack.version, ack.digest) == (version, served.release.digest)
            assert ack.canary_gap is not None
            result = await ask(actor)
            assert served.worst_error(PROMPT, result) < FP32_NATS
            assert {v for spans in result.version_spans for v, _ in spans} == {version}
        whole = weights(3)  # a full release goes into the same engine, and adapters after it
        await load(actor, 4, whole.release)
        assert whole.worst_error(PROMPT, await ask(actor)) < FP32_NATS
        again = adapted(2, base)
        await load(actor, 5, again.release)
        assert again.worst_error(PROMPT, await ask(actor)) < FP32_NATS

    shared.play(story)


def test_adapters_of_another_base_are_refused_and_the_old_version_goes_on(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        base = loaded_digest(shared.spec.model.path)
        served, foreign = adapted(1, base), adapted(2, "another")
        await load(actor, 1, served.release)
        with pytest.raises(WeightSyncFailed, match="base of the adapters"):
            await load(actor, 2, foreign.release)
        assert served.worst_error(PROMPT, await ask(actor)) < FP32_NATS

    shared.play(story)


def test_a_release_whose_digest_is_another_is_refused(shared: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        served = adapted(1, loaded_digest(shared.spec.model.path))
        await load(actor, 1, served.release)
        other = msgspec.structs.replace(served.release, digest="0" * 32)
        with pytest.raises(WeightSyncFailed, match="digest"):
            await load(actor, 2, other)
        assert served.worst_error(PROMPT, await ask(actor)) < FP32_NATS

    shared.play(story)
