"""Engine actors in this process: a base around the stub engine, and the embedded one."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
import torch
import xxhash
from transformers import AutoModelForCausalLM

from offbeat.actors.embedded_engine_actor import EmbeddedEngineActor
from offbeat.actors.engine_actor import EngineActor, TakenRelease
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.stub import StubConfig
from offbeat.generators.spec import EngineSpec
from offbeat.generators.stub import StubEngine
from offbeat.messages.failures import (
    EngineUnavailable,
    InvalidRequest,
    RemoteBug,
    StaleFence,
    WeightSyncFailed,
)
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, plan, release_digest
from offbeat.weight_sync.served import loaded_digest
from offbeat.weight_sync.source import ModuleSource
from tests.support.virtual_time import run

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
FENCE = Fence("run", 1)
REQUEST = GenerateRequest("r", (3, 4, 5), 4, SamplingParams(max_new_tokens=4, seed=1))


def spec(model_path: str = "m", run_dir: str = "unused") -> EngineSpec:
    return EngineSpec(
        name="generator-0",
        model=ModelConfig(path=model_path),
        generator=EmbeddedGeneratorConfig(deterministic=True),
        stub=StubConfig(),
        seed=0,
        run_dir=run_dir,
    )


class Checking(EngineActor):
    """Verifies a release as the embedded engine does, and takes it by taking time."""

    def __init__(self, kind: type[StubEngine] = StubEngine) -> None:
        self.stub = kind(StubConfig(), name="generator-0", incarnation="incarnation-1", seed=0)
        super().__init__(spec(), self.stub, "incarnation-1")

    async def _take(
        self, epoch: int, release: WeightRelease, chunks: tuple[Bytes, ...]
    ) -> TakenRelease:
        digests = [xxhash.xxh3_128_hexdigest(each.data) for each in chunks]
        got = release_digest(release.manifest, digests)
        if got != release.digest:
            raise TransferRefused(epoch, "digest", got, release.digest)
        await self.stub.set_version(release.version)
        return TakenRelease(0.0, None)


def release(version: int, content: int = 0) -> WeightRelease:
    manifest = plan([("w", (16,), "uint8")], 1024)
    chunk = np.full(16, content, np.uint8)
    digest = release_digest(manifest, [xxhash.xxh3_128_hexdigest(chunk.data)])
    return WeightRelease(version, digest, manifest, (chunk,), 16)


async def load(
    actor: EngineActor,
    new: WeightRelease,
    *,
    epoch: int = 1,
    digest: str = "",
    fence: Fence = FENCE,
) -> WeightsAck:
    about = msgspec.structs.replace(new.without_handles(), digest=digest or new.digest)
    return await actor.load(fence, epoch, about, *new.handles)


async def generate(actor: EngineActor, request: GenerateRequest = REQUEST) -> GenerateResult:
    (answer,) = await actor.exchange("worker", request.request_id, [(0, request)], [])
    if answer.failure is not None:
        raise answer.failure
    assert answer.value is not None
    return answer.value


def test_an_engine_holds_no_version_until_it_took_one_and_then_acks_what_it_serves() -> None:
    async def main() -> None:
        actor = Checking()
        state = await actor.state(FENCE)
        assert (state.version, state.digest, state.incarnation) == (None, None, "incarnation-1")
        ack = await load(actor, release(3), epoch=7)
        assert (ack.engine, ack.incarnation, ack.epoch, ack.version, ack.digest) == (
            *("generator-0", "incarnation-1", 7, 3),
            release(3).digest,
        )
        state = await actor.state(FENCE)
        assert (state.version, state.digest) == (ack.version, ack.digest)
        assert (await generate(actor)).version_spans[0][0][0] == 3

    run(main())


def test_a_release_with_another_digest_is_refused_and_the_old_version_goes_on() -> None:
    async def main() -> None:
        actor = Checking()
        await load(actor, release(1))
        with pytest.raises(WeightSyncFailed, match="weight version 2"):
            await load(actor, release(2), digest="another", epoch=2)
        state = await actor.state(FENCE)
        assert (state.version, state.digest) == (1, release(1).digest)
        assert (await generate(actor)).version_spans[0][0][0] == 1
        assert (await load(actor, release(2), epoch=3)).version == 2

    run(main())


def test_a_replaced_controller_can_neither_look_nor_load() -> None:
    async def main() -> None:
        actor = Checking()
        await actor.state(Fence("run", 2))
        with pytest.raises(StaleFence):
            await actor.state(FENCE)
        with pytest.raises(StaleFence):
            await load(actor, release(1))
        assert (await actor.state(Fence("run", 2))).version is None

    run(main())


def test_a_request_that_cannot_be_served_fails_as_its_own_class() -> None:
    async def main() -> None:
        actor = Checking()
        await load(actor, release(0))
        first = asyncio.ensure_future(actor.exchange("worker", "incarnation", [(0, REQUEST)], []))
        await asyncio.sleep(0)
        again = await actor.exchange("worker", "incarnation", [(1, REQUEST)], [])
        (refused,) = [*await first, *again]
        assert refused.id == 1
        assert isinstance(refused.failure, InvalidRequest)

    run(main())


def test_an_engine_without_weights_of_this_run_generates_nothing() -> None:
    async def main() -> None:
        with pytest.raises(EngineUnavailable, match="holds no weights of this run"):
            await generate(Checking())

    run(main())


def test_what_nobody_expected_is_a_bug_of_this_engine() -> None:
    async def main() -> None:
        class Broken(StubEngine):
            async def generate(self, request: GenerateRequest) -> GenerateResult:
                raise ZeroDivisionError("division by zero")

        broken = Checking(Broken)
        await load(broken, release(0))
        with pytest.raises(RemoteBug, match="generator-0 raised ZeroDivisionError in generate"):
            await generate(broken)

    run(main())


def test_a_cancelled_request_is_no_longer_open_and_a_closed_engine_serves_none() -> None:
    async def main() -> None:
        actor = Checking()
        await load(actor, release(0))
        asked = asyncio.ensure_future(actor.exchange("worker", "incarnation", [(0, REQUEST)], []))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await actor.state(FENCE)).running == 1
        assert await actor.exchange("worker", "incarnation", [], [0]) == []
        assert await asked == []
        assert (await actor.state(FENCE)).running == 0
        await actor.close()
        with pytest.raises(EngineUnavailable, match="it was closed"):
            await generate(actor)

    run(main())


# The embedded engine on the model that comes with the repository.


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model with other weights."""
    path = tmp_path_factory.mktemp("changed")
    model = AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def release_of(path: Path, version: int) -> WeightRelease:
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    source = ModuleSource(model, chunk_bytes=200_000)
    chunks, digests = zip(*source.chunks(), strict=True)
    digest = release_digest(source.manifest, digests)
    return WeightRelease(version, digest, source.manifest, chunks, source.manifest.nbytes)


def with_embedded(
    path: Path, run_dir: Path, use: Callable[[EmbeddedEngineActor], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        actor = EmbeddedEngineActor(spec(str(path), str(run_dir)))
        try:
            await use(actor)
        finally:
            await actor.close()
            structlog.get_config()["logger_factory"]().close()  # its process would end here

    asyncio.run(main())


def same(one: GenerateResult, other: GenerateResult) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(
        one.logprobs, other.logprobs
    )


def test_after_a_load_the_engine_samples_exactly_as_one_made_from_the_new_weights(
    changed: Path, tmp_path: Path
) -> None:
    expected = list[GenerateResult]()

    async def expect(actor: EmbeddedEngineActor) -> None:
        await load(actor, release_of(changed, 5))
        expected.append(await generate(actor))

    async def load_and_compare(actor: EmbeddedEngineActor) -> None:
        await load(actor, release_of(TINY, 4))
        before = await generate(actor)
        ack = await load(actor, release_of(changed, 5), epoch=2)
        assert ack.version == 5
        after = await generate(actor)
        assert after.version_spans[0][0][0] == 5
        assert same(after, expected[0])
        assert not same(after, before)

    with_embedded(changed, tmp_path, expect)
    with_embedded(TINY, tmp_path, load_and_compare)


def test_an_engine_serves_what_it_loaded_as_if_a_trainer_had_sent_it(tmp_path: Path) -> None:
    async def use(actor: EmbeddedEngineActor) -> None:
        ack = await actor.serve_loaded(FENCE, 1, 0)
        assert (ack.version, ack.digest) == (0, loaded_digest(str(TINY)))
        unsent = await generate(actor)
        await load(actor, release_of(TINY, 1), epoch=2)
        assert same(await generate(actor), unsent)
        with pytest.raises(WeightSyncFailed, match="took the place of the loaded weights"):
            await actor.serve_loaded(FENCE, 3, 0)

    with_embedded(TINY, tmp_path, use)


def test_other_weights_under_the_same_name_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = loaded_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert loaded_digest(str(tmp_path)) != before


@pytest.mark.parametrize("wrong", ["digest", "byte", "chunk missing"])
def test_a_release_that_is_not_whole_leaves_the_engine_as_it_was(
    changed: Path, tmp_path: Path, wrong: str
) -> None:
    async def use(actor: EmbeddedEngineActor) -> None:
        await load(actor, release_of(TINY, 1))
        before = await generate(actor)
        new = release_of(changed, 2)
        chunks = list(new.chunks)
        if wrong == "byte":
            chunks[-1] = chunks[-1] ^ np.uint8(1)
        if wrong == "chunk missing":
            chunks.pop()
        digest = "another" if wrong == "digest" else new.digest
        with pytest.raises(WeightSyncFailed, match="generator-0 did not take weight version 2"):
            await load(actor, msgspec.structs.replace(new, chunks=chunks), epoch=2, digest=digest)
        state = await actor.state(FENCE)
        assert (state.version, state.digest) == (1, release_of(TINY, 1).digest)
        assert same(await generate(actor), before)
        assert (await load(actor, new, epoch=3)).version == 2

    with_embedded(TINY, tmp_path, use)
