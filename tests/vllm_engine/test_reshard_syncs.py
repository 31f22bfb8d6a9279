"""``sync.transport: reshard`` into vLLM: every worker fetches what its own loader reads, and no more."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from outcomes import FP32_NATS
from releases import CHUNK_BYTES, Weights, released
from sharded_trainer import MEGATRON, PIPELINE, ShardedTrainer, factor
from shared_engine import (
    FENCE,
    PROMPT,
    Engine,
    Shared,
    TakenOver,
    ask,
    endless_model,
    fetch,
    layout_of,
    load,
    running,
    spec_in,
    until,
)
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from offbeat.messages.failures import EngineUnavailable, ReleaseLost, WeightSyncFailed
from offbeat.messages.generation import GenerateResult
from offbeat.plugins.verify_weights.legs import compare_served
from offbeat.plugins.vllm.engine_actor import VllmEngineActor
from offbeat.plugins.vllm.server import start
from offbeat.weight_sync.engine_layout import find_needed_buckets
from tests.support.plain_modules import ModuleSource

FLOAT32_BYTES = 4
PYTHON = Path(__file__).parents[2] / ".venv" / "bin" / "python"


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
    made = ShardedTrainer(model, model.parent)
    yield made
    made.close()


@cache
def weights(model: Path, version: int) -> Weights:
    """What the trainer holds at a version, and a release of it in whole tensors."""
    module = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor(version))
    source = ModuleSource(module.eval(), CHUNK_BYTES)
    packed = [chunk.copy() for chunk, _ in source.chunks()]
    return Weights(module, released(version, source.manifest, packed))


async def is_exact(actor: Engine, model: Path, version: int) -> GenerateResult:
    """One sample, whose logprobs are those that the trainer computes."""
    result = await ask(actor, f"exact {version}", samples=1)
    assert weights(model, version).worst_error(PROMPT, result) < FP32_NATS
    assert {v for spans in result.version_spans for v, _ in spans} == {version}
    return result


async def has_the_bits_of_the_release(actor: Engine) -> None:
    """In every worker's own matrices, joined, cut and packed as they are."""
    _, leg = compare_served(await actor.served_weights(), "no checkpoint")
    assert leg.is_equal, leg


@pytest.mark.timeout(900)
def test_workers_fetch_what_the_plan_has_for_them_and_compute_what_whole_tensors_give(
    engine: Shared, trainer: ShardedTrainer, model: Path
) -> None:
    """Bit for bit: the same tokens with the same logprobs as after a release of whole tensors."""

    async def story(actor: Engine) -> None:
        layout = await layout_of(actor)
        ranks = [layout.needs(rank) for rank in range(len(layout.ranks))]
        for epoch, version, planned in ((1, 1, False), (3, 2, True)):
            asked = layout if planned else None
            release = await asyncio.to_thread(trainer.publish, version, asked)
            ack = await fetch(actor, epoch, version, release)
            assert (ack.epoch, ack.version, ack.digest) == (epoch, version, release.digest)
            fetched = await is_exact(actor, model, version)
            await has_the_bits_of_the_release(actor)
            await load(actor, epoch + 1, weights(model, version).release)
            whole = await is_exact(actor, model, version)
            await has_the_bits_of_the_release(actor)
            assert np.array_equal(fetched.token_ids, whole.token_ids)
            assert np.array_equal(fetched.logprobs, whole.logprobs)
            manifest, sent = release.manifest, sum(trainer.sent())
            buckets = [find_needed_buckets(epoch, manifest, each) for each in ranks]
            assert sent == sum(manifest.chunk_nbytes[at] for each in buckets for at in each)
            content = sum(
                piece.region.elements * FLOAT32_BYTES
                for each in buckets
                for piece in manifest.pieces
                if piece.chunk in each
            )
            needed = sum(
                region.elements * FLOAT32_BYTES
                for needs in ranks
                for regions in needs.values()
                for region in regions
            )
            assert content == needed if planned else content >= needed
            engine.note(f"{len(ranks)} workers, planned {planned}: {sent=} {content=} {needed=}")

    engine.play(story)


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not PYTHON.exists(), reason="megatron-core is in the environment of `make test`"
)
@pytest.mark.parametrize("trainer_config", [MEGATRON, PIPELINE], ids=["tensor ranks", "stages"])
def test_ranks_of_megatron_send_what_workers_load_bit_for_bit(
    engine: Shared, model: Path, trainer_config: dict[str, Any]
) -> None:
    """Two ranks cut matrices by rows and columns, or layers; workers fetch from both what each loads."""

    async def story(actor: Engine) -> None:
        layout = await layout_of(actor)
        megatron = ShardedTrainer(model, model.parent, trainer=trainer_config, python=PYTHON)
        try:
            for version, planned in ((1, None), (2, layout)):
                release = await asyncio.to_thread(megatron.publish, version, planned)
                await fetch(actor, 2 * version, version, release)
                fetched = await is_exact(actor, model, version)
                await has_the_bits_of_the_release(actor)
                assert all(megatron.sent()), "each rank sends"
                await load(actor, 2 * version + 1, weights(model, version).release)
                whole = await is_exact(actor, model, version)
                assert np.array_equal(fetched.logprobs, whole.logprobs)
        finally:
            megatron.close()

    engine.play(story)


@pytest.mark.timeout(900)
def test_an_engine_without_a_recorded_layout_makes_whole_tensors_and_says_why(
    engine: Shared, trainer: ShardedTrainer, model: Path
) -> None:
    async def story(actor: Engine) -> None:
        layout = await layout_of(actor)
        actor.updates.layout.give_up("w is written by an operation that is not a copy")
        assert await actor.layout(FENCE) is None
        release = await asyncio.to_thread(trainer.publish, 4, layout)
        with capture_logs() as log:
            await fetch(actor, 1, 4, release)
        (said,) = [each for each in log if each["event"] == "weights.whole_tensors"]
        assert "w is written by an operation that is not a copy" in said["reason"]
        await is_exact(actor, model, 4)

    engine.play(story)


@pytest.mark.timeout(900)
def test_a_trainer_rank_that_is_killed_at_a_bucket_leaves_the_engine_as_it_was_and_the_next_heals(
    engine: Shared, model: Path
) -> None:
    async def story(actor: Engine) -> None:
        await load(actor, 1, weights(model, 1).release)
        layout = await layout_of(actor)
        doomed = ShardedTrainer(model, model.parent)
        try:
            release = await asyncio.to_thread(doomed.publish, 2, layout, "killed", 1)
            with pytest.raises((ReleaseLost, WeightSyncFailed), match="no other rank holds bucket"):
                await fetch(actor, 2, 2, release)
        finally:
            doomed.close()
        await is_exact(actor, model, 1)
        healthy = ShardedTrainer(model, model.parent)
        try:
            await fetch(actor, 3, 3, await asyncio.to_thread(healthy.publish, 3, layout))
        finally:
            healthy.close()
        await is_exact(actor, model, 3)

    engine.play(story)


@pytest.mark.timeout(900)
def test_a_worker_killed_in_the_middle_of_its_fetch_is_noticed_at_once_and_the_next_one_is_exact(
    tmp_path: Path, trainer: ShardedTrainer, model: Path
) -> None:
    """A rank of the trainer is stopped at its second bucket, so that the fetch has no end."""

    async def story() -> None:
        spec = spec_in(tmp_path, model, call_deadline_s=3600.0, heartbeat_deadline_s=3600.0)
        me, rank = psutil.Process(), psutil.Process(trainer.processes[1].pid)
        others = me.children(recursive=True)
        library, llm = start(spec)
        actor = TakenOver(spec, (library, llm))
        release = await asyncio.to_thread(trainer.publish, 1, await layout_of(actor), "stopped", 1)
        fetching = asyncio.ensure_future(fetch(actor, 1, 1, release))
        await until(lambda: rank.status() == psutil.STATUS_STOPPED)
        (worker,) = [
            each
            for each in me.children(recursive=True)
            if each not in others and "Worker" in "".join(each.cmdline()[:1])
        ]
        worker.kill()
        with pytest.raises(EngineUnavailable):
            await fetching
        os.kill(rank.pid, signal.SIGCONT)
        await VllmEngineActor.close(actor)
        heir = Engine(spec)
        release = await asyncio.to_thread(trainer.publish, 2, await layout_of(heir))
        await fetch(heir, 1, 2, release)
        await is_exact(heir, model, 2)
        await heir.close()

    asyncio.run(story())
