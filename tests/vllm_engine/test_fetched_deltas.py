"""``sync.delta`` over a reshard into vLLM: each worker rebuilds what it loads from its last fetch."""

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from outcomes import FP32_NATS
from releases import Weights
from sharded_trainer import ShardedTrainer, factor
from shared_engine import (
    FENCE,
    PROMPT,
    Engine,
    Shared,
    ask,
    endless_model,
    fetch,
    layout_of,
    load,
    running,
)
from transformers import AutoModelForCausalLM

from offbeat.messages.failures import BaseRefused, WeightSyncFailed
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.plugins.verify_weights.legs import compare_served
from offbeat.weight_sync.engine_layout import find_needed_buckets
from offbeat.weight_sync.transport import PublishedRelease


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[1, 2], ids=["TP1", "TP2"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Shared]:
    yield from running(tmp_path_factory.mktemp("engine"), model, request.param)


@pytest.fixture(scope="module")
def trainer(model: Path) -> Iterator[ShardedTrainer]:
    made = ShardedTrainer(model, model.parent, delta=True)
    yield made
    made.close()


@cache
def weights(model: Path, version: int) -> Weights:
    """What the trainer holds at a version."""
    module = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.mul_(factor(version, name, delta=True))
    return Weights(module.eval(), None)  # type: ignore[arg-type]  # no release is needed of it


async def fetch_delta(
    actor: Engine, epoch: int, version: int, release: PublishedRelease
) -> WeightsAck:
    """As the controller's adapter calls it."""
    manifest, digest, _, delta, reason = release
    assert delta is not None, reason
    whole = WeightRelease(version, digest, manifest, (), manifest.nbytes, delta=delta)
    return await load(actor, epoch, whole)


async def is_served(actor: Engine, model: Path, ack: WeightsAck, release: PublishedRelease) -> None:
    """By digest, by the bits that workers compute with, and by logprobs."""
    assert ack.digest == release.digest
    _, loaded = compare_served(await actor.served_weights(), "no checkpoint")
    assert loaded.is_equal, loaded
    result = await ask(actor, f"exact {ack.version}")
    assert weights(model, ack.version).worst_error(PROMPT, result) < FP32_NATS
    assert {v for spans in result.version_spans for v, _ in spans} == {ack.version}


@pytest.mark.timeout(900)
def test_workers_fetch_changes_alone_and_serve_what_the_trainer_holds(
    engine: Shared, trainer: ShardedTrainer, model: Path
) -> None:
    async def story(actor: Engine) -> None:
        layout = await layout_of(actor)
        needs = [layout.needs(rank) for rank in range(len(layout.ranks))]
        first = await asyncio.to_thread(trainer.publish, 1, layout)
        await is_served(actor, model, await fetch(actor, 1, 1, first), first)
        whole = sum(trainer.sent())
        for version in (2, 3):
            new = await asyncio.to_thread(trainer.publish, version)
            ack = await fetch_delta(actor, version, version, new)
            sent = sum(trainer.sent())
            await is_served(actor, model, ack, new)
            assert new.delta is not None
            parts = new.delta.manifest.chunk_nbytes
            buckets = [find_needed_buckets(version, new.manifest, each) for each in needs]
            assert sent == sum(parts[at] for each in buckets for at in each)
            assert sent < whole / 10
            engine.note(f"{len(needs)} workers: {sent} bytes of changes, {whole} of the release")

    engine.play(story, keeps_base=True)


@pytest.mark.timeout(900)
def test_an_engine_that_skipped_a_release_or_lost_its_workers_base_refuses_and_takes_the_full_one(
    engine: Shared, trainer: ShardedTrainer, model: Path
) -> None:
    async def story(actor: Engine) -> None:
        layout = await layout_of(actor)
        first = await asyncio.to_thread(trainer.publish, 1, layout)
        await fetch(actor, 1, 1, first)
        await asyncio.to_thread(trainer.publish, 2)
        new = await asyncio.to_thread(trainer.publish, 3)
        with pytest.raises(BaseRefused, match=first.digest):
            await fetch_delta(actor, 2, 3, new)
        assert (await actor.state(FENCE)).version == 1
        await is_served(actor, model, await fetch(actor, 3, 3, new), new)
        with pytest.raises(BaseRefused):
            await fetch_delta(actor, 4, 3, new)
        await asyncio.to_thread(trainer.publish, 4)
        other = await asyncio.to_thread(trainer.publish, 5)
        actor.believe(other)
        with pytest.raises(WeightSyncFailed, match=r"base in worker \d is"):
            await fetch_delta(actor, 5, 5, other)
        result = await ask(actor, "as before")
        assert weights(model, 3).worst_error(PROMPT, result) < FP32_NATS
        await is_served(actor, model, await fetch(actor, 6, 5, other), other)

    engine.play(story, keeps_base=True)


@pytest.mark.timeout(900)
def test_an_engine_whose_layout_is_not_recorded_rebuilds_what_it_makes_whole_tensors_of(
    engine: Shared, trainer: ShardedTrainer, model: Path
) -> None:
    async def story(actor: Engine) -> None:
        actor.updates.layout.give_up("w is written by an operation that is not a copy")
        assert await actor.layout(FENCE) is None
        first = await asyncio.to_thread(trainer.publish, 4)
        await fetch(actor, 1, 4, first)
        new = await asyncio.to_thread(trainer.publish, 5)
        ack = await fetch_delta(actor, 2, 5, new)
        assert ack.digest == new.digest
        result = await ask(actor, "exact 5")
        assert weights(model, 5).worst_error(PROMPT, result) < FP32_NATS

    engine.play(story, keeps_base=True)
