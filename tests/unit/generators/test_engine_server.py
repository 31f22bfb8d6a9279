"""Engine servers: a base around the stub engine, and the server of the embedded engine."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from transformers import AutoModelForCausalLM

from offbeat.config.sections.generator import EmbeddedGeneratorConfig, StubConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.fakes.engine import StubEngine
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.engine_server import EngineServer, LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.spec import EngineSpec
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
from offbeat.weight_sync.manifest import release_digest
from offbeat.weight_sync.served import digest_loaded
from tests.support.plain_modules import ModuleSource
from tests.support.release_parts import filled_release

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
FENCE = Fence("run", 1)
REQUEST = GenerateRequest("r", (3, 4, 5), 4, SamplingParams(max_new_tokens=4, seed=1))


def spec(model_path: str = "m") -> EngineSpec:
    return EngineSpec(
        name="generator-0",
        model=ModelConfig(path=model_path),
        generator=EmbeddedGeneratorConfig(deterministic=True),
        stub=StubConfig(),
        seed=0,
        run_dir="unused",
    )


class Checking(EngineServer):
    """Verifies a release as the embedded engine does; loading takes time and nothing else."""

    def __init__(self, kind: type[StubEngine] = StubEngine) -> None:
        self.stub = kind(StubConfig(), name="generator-0", incarnation="incarnation-1", seed=0)
        super().__init__(spec(), self.stub, "incarnation-1")

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        release = incoming.release
        digests = [xxhash.xxh3_128_hexdigest(each.data) for each in await incoming.bring_whole()]
        got = release_digest(release.manifest, digests)
        if got != release.digest:
            raise TransferRefused(incoming.epoch, "digest", got, release.digest)
        await self.stub.set_version(release.version)
        return LoadOutcome(0.0, None)


async def load(
    server: EngineServer,
    new: WeightRelease,
    *,
    epoch: int = 1,
    digest: str = "",
    fence: Fence = FENCE,
) -> WeightsAck:
    about = msgspec.structs.replace(new.without_handles(), digest=digest or new.digest)
    return await server.load(fence, epoch, about, *new.handles)


async def test_an_engine_holds_no_version_until_it_took_one_and_then_acks_what_it_serves() -> None:
    server = Checking()
    state = await server.state(FENCE)
    assert (state.version, state.digest, state.incarnation) == (None, None, "incarnation-1")
    ack = await load(server, filled_release(3), epoch=7)
    assert (ack.engine, ack.incarnation, ack.epoch, ack.version, ack.digest) == (
        *("generator-0", "incarnation-1", 7, 3),
        filled_release(3).digest,
    )
    state = await server.state(FENCE)
    assert (state.version, state.digest) == (ack.version, ack.digest)
    assert (await server.generate(REQUEST)).version_spans[0][0][0] == 3


async def test_a_release_with_another_digest_is_refused_and_the_old_version_goes_on() -> None:
    server = Checking()
    await load(server, filled_release(1))
    with pytest.raises(WeightSyncFailed, match="weight version 2"):
        await load(server, filled_release(2), digest="another", epoch=2)
    state = await server.state(FENCE)
    assert (state.version, state.digest) == (1, filled_release(1).digest)
    assert (await server.generate(REQUEST)).version_spans[0][0][0] == 1
    assert (await load(server, filled_release(2), epoch=3)).version == 2


async def test_a_replaced_controller_can_neither_look_nor_load() -> None:
    server = Checking()
    await server.state(Fence("run", 2))
    with pytest.raises(StaleFence):
        await server.state(FENCE)
    with pytest.raises(StaleFence):
        await load(server, filled_release(1))
    assert (await server.state(Fence("run", 2))).version is None


async def test_an_engine_without_weights_of_this_run_generates_nothing() -> None:
    with pytest.raises(EngineUnavailable, match="holds no weights of this run"):
        await Checking().generate(REQUEST)


def test_an_error_that_is_no_failure_of_this_package_is_a_bug_of_the_engine() -> None:
    server = Checking()
    failure = InvalidRequest("r", "its id is open", "Use each id once")
    assert server.classify(failure) is failure
    bug = server.classify(ZeroDivisionError("division by zero"))
    assert isinstance(bug, RemoteBug)
    assert "generator-0 raised ZeroDivisionError in generate" in str(bug)


async def test_a_cancelled_request_is_no_longer_open_and_a_closed_engine_serves_none() -> None:
    server = Checking()
    await load(server, filled_release(0))
    call = asyncio.ensure_future(server.generate(REQUEST))
    await asyncio.sleep(0)
    assert (await server.state(FENCE)).running == 1
    call.cancel()
    await asyncio.wait([call])
    assert (await server.state(FENCE)).running == 0
    await server.close()
    with pytest.raises(EngineUnavailable, match="it was closed"):
        await server.generate(REQUEST)


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


def release_of(path: Path, version: int, chunk_bytes: int = 200_000) -> WeightRelease:
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    source = ModuleSource(model, chunk_bytes)
    chunks, digests = zip(*source.chunks(), strict=True)
    digest = release_digest(source.manifest, digests)
    return WeightRelease(version, digest, source.manifest, chunks, source.manifest.nbytes)


def with_embedded(
    path: Path, use: Callable[[EmbeddedEngineServer], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        server = EmbeddedEngineServer(spec(str(path)))
        try:
            await use(server)
        finally:
            await server.close()

    asyncio.run(main())


def same(one: GenerateResult, other: GenerateResult) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(
        one.logprobs, other.logprobs
    )


def test_after_a_load_the_engine_samples_exactly_as_one_made_from_the_new_weights(
    changed: Path,
) -> None:
    expected = list[GenerateResult]()

    async def expect(server: EmbeddedEngineServer) -> None:
        await load(server, release_of(changed, 5))
        expected.append(await server.generate(REQUEST))

    async def load_and_compare(server: EmbeddedEngineServer) -> None:
        await load(server, release_of(TINY, 4))
        before = await server.generate(REQUEST)
        ack = await load(server, release_of(changed, 5), epoch=2)
        assert ack.version == 5
        after = await server.generate(REQUEST)
        assert after.version_spans[0][0][0] == 5
        assert same(after, expected[0])
        assert not same(after, before)

    with_embedded(changed, expect)
    with_embedded(TINY, load_and_compare)


def test_an_engine_serves_what_it_loaded_as_if_a_trainer_had_sent_it() -> None:
    initial = WeightRelease(0, digest_loaded(str(TINY)), manifest=None, chunks=(), nbytes=0)

    async def use(server: EmbeddedEngineServer) -> None:
        ack = await server.load(FENCE, 1, initial)
        assert (ack.version, ack.digest) == (0, digest_loaded(str(TINY)))
        unsent = await server.generate(REQUEST)
        await load(server, release_of(TINY, 1), epoch=2)
        assert same(await server.generate(REQUEST), unsent)
        with pytest.raises(WeightSyncFailed, match="replaced the loaded weights"):
            await server.load(FENCE, 3, initial)

    with_embedded(TINY, use)


def test_other_weights_under_the_same_name_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = digest_loaded(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert digest_loaded(str(tmp_path)) != before


@pytest.mark.parametrize("wrong", ["digest", "byte", "chunk missing"])
def test_a_release_that_is_not_whole_leaves_the_engine_as_it_was(changed: Path, wrong: str) -> None:
    async def use(server: EmbeddedEngineServer) -> None:
        await load(server, release_of(TINY, 1))
        before = await server.generate(REQUEST)
        new = release_of(changed, 2)
        chunks = list(new.chunks)
        if wrong == "byte":
            chunks[-1] = chunks[-1] ^ np.uint8(1)
        if wrong == "chunk missing":
            chunks.pop()
        digest = "another" if wrong == "digest" else new.digest
        with pytest.raises(WeightSyncFailed, match="generator-0 did not load weight version 2"):
            await load(server, msgspec.structs.replace(new, chunks=chunks), epoch=2, digest=digest)
        state = await server.state(FENCE)
        assert (state.version, state.digest) == (1, release_of(TINY, 1).digest)
        assert same(await server.generate(REQUEST), before)
        assert (await load(server, new, epoch=3)).version == 2

    with_embedded(TINY, use)


# Blocking work stays off the event loop.


class WatchedChunk(np.ndarray):
    """Chunk whose bytes are not readable before ``go_on``; records the threads that read them."""

    def __array_finalize__(self, of: Any) -> None:
        self.readers: list[int] = getattr(of, "readers", [])
        self.is_read: threading.Event = getattr(of, "is_read", threading.Event())
        self.go_on: threading.Event = getattr(of, "go_on", threading.Event())

    @property
    def data(self) -> memoryview:
        self.readers.append(threading.get_ident())
        self.is_read.set()
        assert self.go_on.wait(30), "the event loop is blocked"
        return np.asarray(self).data


def watched_release(path: Path, version: int) -> tuple[WeightRelease, list[WatchedChunk]]:
    plain = release_of(path, version)
    chunks = [chunk.view(WatchedChunk) for chunk in plain.chunks]
    return msgspec.structs.replace(plain, chunks=tuple(chunks)), chunks


def test_the_event_loop_answers_calls_while_a_thread_hashes_a_release() -> None:
    async def use(server: EmbeddedEngineServer) -> None:
        new, chunks = watched_release(TINY, 1)
        loading = asyncio.ensure_future(load(server, new))
        await asyncio.to_thread(chunks[0].is_read.wait)
        assert (await server.state(FENCE)).version is None
        for each in chunks:
            each.go_on.set()
        assert (await loading).version == 1
        readers = {reader for each in chunks for reader in each.readers}
        assert readers and threading.get_ident() not in readers

    with_embedded(TINY, use)


def test_a_cancelled_load_hashes_no_further_chunk_and_leaves_the_engine_as_it_was(
    changed: Path,
) -> None:
    async def use(server: EmbeddedEngineServer) -> None:
        await load(server, release_of(TINY, 1))
        before = await server.generate(REQUEST)
        new, chunks = watched_release(changed, 2)
        loading = asyncio.ensure_future(load(server, new, epoch=2))
        await asyncio.to_thread(chunks[0].is_read.wait)
        loading.cancel()
        for _ in range(9):
            await asyncio.sleep(0)
        assert not loading.done(), "its thread still reads the first chunk"
        chunks[0].go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert [bool(each.readers) for each in chunks] == [True] + [False] * (len(chunks) - 1)
        state = await server.state(FENCE)
        assert (state.version, state.digest) == (1, release_of(TINY, 1).digest)
        assert same(await server.generate(REQUEST), before)
        assert (await load(server, release_of(changed, 2), epoch=3)).version == 2

    with_embedded(TINY, use)


@pytest.mark.real_clock
async def test_an_older_release_that_was_overtaken_while_it_was_fetched_is_refused(
    changed: Path,
) -> None:
    class Slow(EmbeddedEngineServer):
        """The first release is in memory only once the second is served."""

        async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
            if incoming.epoch == 1:
                await newer_is_served.wait()
            return await super()._load_release(incoming)

    newer_is_served = asyncio.Event()

    server = Slow(spec(str(TINY)))
    older = asyncio.ensure_future(load(server, release_of(changed, 1)))
    await asyncio.sleep(0)
    await load(server, release_of(TINY, 2, 100_000), epoch=2)  # another layout and receiver
    sampled = await server.generate(REQUEST)
    newer_is_served.set()
    with pytest.raises(WeightSyncFailed, match="epoch is 1, expected the newest, 2"):
        await older
    assert (await server.state(FENCE)).version == 2
    assert same(await server.generate(REQUEST), sampled)
    await server.close()


def test_a_process_that_serves_an_engine_without_an_actor_loads_no_ray() -> None:
    program = (
        "import sys\n"
        "import offbeat.generators.embedded.server, offbeat.generators.embedded.start\n"
        "import offbeat.fakes.engine_server\n"
        "print(*{'ray', 'offbeat.actors'} & {*sys.modules})"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert finished.stdout.split() == []
