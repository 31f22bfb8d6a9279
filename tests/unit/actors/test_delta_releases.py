"""Releases as what they change, from a sender to engine actors: the failure table, row by row.

Each case ends with a release that the engine serves bit for bit.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from offbeat.actors.engine_actor import EngineActor, TakenRelease
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.stub import StubConfig
from offbeat.generators.spec import EngineSpec
from offbeat.generators.stub import StubEngine
from offbeat.messages.failures import BaseRefused, CanaryFailed, WeightSyncFailed
from offbeat.messages.fences import Fence
from offbeat.messages.weights import FullReason, WeightRelease, WeightsAck
from offbeat.weight_sync.delta import DeltaPacker, HeldRelease, rebuilt
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.receiver import ModuleReceiver
from offbeat.weight_sync.source import ModuleSource
from offbeat.weight_sync.transport import Sender, release_of, with_handles_apart
from offbeat.weight_sync.transports.gloo_sender import GlooSender
from offbeat.weight_sync.transports.messages import TransferTimeouts
from offbeat.weight_sync.transports.object_store import ObjectStoreSender

FENCE = Fence("run", 1)
CHUNK_BYTES = 4096
PATIENT = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=60.0)


class Model(nn.Module):
    """Three chunks in two types, one of which is never trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.randn(64, 30).bfloat16())
        self.frozen = nn.Parameter(torch.randn(40, 50).bfloat16())
        self.norm = nn.Parameter(torch.randn(500))

    def step(self, share: float = 0.01) -> None:
        """Move a few values by one step of their type, and plant what compares badly."""
        with torch.no_grad():
            words = self.first.view(torch.int16).view(-1)
            words[torch.rand(words.numel()) < share] += 1
            self.norm[3] = float("nan")
            self.norm[4] = -self.norm[4] * 0.0

    def content(self) -> bytes:
        return b"".join(
            each.detach().view(torch.uint8).numpy().tobytes() for each in self.parameters()
        )


class LoadingEngine(EngineActor):
    """Engine actor that loads releases into a module; the next canary fails if it is told so."""

    def __init__(self) -> None:
        self.model, self.fails = Model(7), False
        self.receiver = ModuleReceiver(self.model)
        stub = StubEngine(StubConfig(), name="g0", incarnation="g0-1", seed=0)
        model, generator = ModelConfig(path="m"), EmbeddedGeneratorConfig()
        spec = EngineSpec("g0", model, generator, StubConfig(), 0, "unused", keeps_base=True)
        super().__init__(spec, stub, "g0-1")

    async def _take(
        self, epoch: int, version: int, digest: str, manifest: Manifest, chunks: tuple[Bytes, ...]
    ) -> TakenRelease:
        try:
            self.receiver.begin(epoch, manifest)
            for index, chunk in enumerate(chunks):
                self.receiver.apply(epoch, index, chunk)
            self.receiver.verify(digest)
        except TransferRefused as refused:
            raise WeightSyncFailed(self._name, epoch, version, str(refused)) from refused
        self.receiver.commit(version)
        if self.fails:
            self.fails = False
            raise CanaryFailed("g0", epoch, version, 1, -1.0, -2.0, 1.0, 0.1)
        return TakenRelease(0.0, None)


@dataclass
class Line:
    """A trainer's model, its sender, and an engine."""

    sender: Sender
    model: Model
    engine: LoadingEngine = field(default_factory=LoadingEngine)
    version: int = 0
    epoch: int = 0

    def published(self, share: float | None = 0.01) -> WeightRelease:
        """Take a step that changes this share of a tensor, None: nothing, and publish."""
        if share is not None:
            self.model.step(share)
        self.version += 1
        count = self.sender.delta_handles
        published, *handles = with_handles_apart(self.sender.publish(self.version), count)
        return release_of(self.version, published, tuple(handles), count)

    async def load(self, release: WeightRelease, *, full: bool = False) -> WeightsAck:
        """Call the engine as its port does."""
        self.epoch += 1
        content: Any = FENCE, self.epoch, release.version, release.digest, release.manifest
        delta = None if full else release.delta
        broadcasts = isinstance(self.sender, GlooSender)
        chunks = release.chunks if delta is None else delta.chunks
        members: Any = (("g0",),) if broadcasts else ()
        if delta is None:
            call = self.engine.receive_weights if broadcasts else self.engine.load_weights
            return await call(*content, *chunks, *members)
        change: Any = self.engine.receive_delta if broadcasts else self.engine.load_delta
        return await change(*content, delta, *chunks, *members)

    async def served(self, release: WeightRelease, *, full: bool = False) -> None:
        ack = await self.load(release, full=full)
        assert (ack.version, ack.digest) == (release.version, release.digest)
        assert self.engine.model.content() == self.model.content()


@pytest.fixture(params=["object_store", "gloo"])
def line(request: pytest.FixtureRequest) -> Any:
    model = Model(1)
    source = ModuleSource(model, CHUNK_BYTES)
    if request.param == "object_store":
        yield Line(ObjectStoreSender(source, delta=True), model)
        return
    made = GlooSender(source, host="127.0.0.1", incarnation="t", timeouts=PATIENT, delta=True)
    yield Line(made, model)
    made.close()


def play(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def test_an_engine_that_serves_the_base_takes_the_changes_alone(line: Line) -> None:
    async def main() -> None:
        first = line.published()
        assert first.full_reason is FullReason.NO_BASE
        await line.served(first)
        for _ in range(3):
            new = line.published()
            assert new.delta is not None
            assert new.delta.nbytes < 0.1 * new.nbytes
            assert 0 < new.delta.changed < 0.1
            await line.served(new)

    play(main)


def test_a_step_that_changes_nothing_is_a_delta_of_headers(line: Line) -> None:
    async def main() -> None:
        await line.served(first := line.published())
        again = line.published(share=None)
        assert again.delta is not None
        assert (again.delta.changed, again.digest) == (0.0, first.digest)
        await line.served(again)

    play(main)


def test_a_chunk_that_changed_everywhere_goes_whole_in_a_delta_of_the_others(line: Line) -> None:
    async def main() -> None:
        await line.served(line.published())
        mixed = line.published(share=1.0)
        assert mixed.delta is not None
        chunk, *_ = line.model.parameters()
        assert max(mixed.delta.manifest.chunk_nbytes) == chunk.nbytes + 24
        await line.served(mixed)

    play(main)


def test_more_changes_than_the_bound_make_a_full_release(line: Line) -> None:
    async def main() -> None:
        await line.served(line.published())
        large = line.published(share=1.0)
        torch.nn.init.normal_(line.model.frozen)
        torch.nn.init.normal_(line.model.first)
        large = line.published()
        assert (large.delta, large.full_reason) == (None, FullReason.TOO_LARGE)
        await line.served(large)
        await line.served(line.published())

    play(main)


def test_a_new_engine_refuses_a_delta_and_takes_the_full_release_of_that_version(
    line: Line,
) -> None:
    async def main() -> None:
        line.published()
        new = line.published()
        with pytest.raises(BaseRefused, match="serves no release of this run") as refused:
            await line.load(new)
        assert new.delta is not None
        assert refused.value.base == new.delta.base
        await line.served(new, full=True)
        await line.served(line.published())

    play(main)


def test_an_engine_that_skipped_a_release_refuses_and_serves_on(line: Line) -> None:
    async def main() -> None:
        await line.served(first := line.published())
        line.published()
        before = line.engine.model.content()
        with pytest.raises(BaseRefused, match=first.digest):
            await line.load(line.published())
        assert line.engine.model.content() == before
        assert (await line.engine.state(FENCE)).digest == first.digest
        await line.served(line.published(), full=True)

    play(main)


def test_a_delta_whose_ack_was_lost_is_not_applied_twice(line: Line) -> None:
    async def main() -> None:
        await line.served(line.published())
        new = line.published()
        await line.served(new)
        with pytest.raises(BaseRefused):
            await line.load(new)
        await line.served(new, full=True)
        await line.served(line.published())

    play(main)


def test_a_restarted_engine_refuses_a_delta_whatever_version_it_names(line: Line) -> None:
    async def main() -> None:
        await line.served(line.published())
        line.engine, line.epoch = LoadingEngine(), 0
        new = line.published()
        with pytest.raises(BaseRefused):
            await line.load(new)
        await line.served(new, full=True)

    play(main)


def test_after_a_rewind_the_next_release_is_a_full_one(line: Line) -> None:
    async def main() -> None:
        await line.served(line.published())
        line.sender.forget()
        again = line.published()
        assert (again.delta, again.full_reason) == (None, FullReason.NO_BASE)
        await line.served(again)
        await line.served(line.published())

    play(main)


def test_an_engine_of_an_abandoned_line_refuses_a_delta_of_the_same_version(line: Line) -> None:
    """Versions are equal on both lines; digests are not."""

    async def main() -> None:
        await line.served(line.published())
        line.sender.forget()
        line.version = 0
        line.published()
        with pytest.raises(BaseRefused):
            await line.load(line.published())
        await line.served(line.published(), full=True)

    play(main)


def test_a_failed_canary_leaves_no_base(line: Line) -> None:
    async def main() -> None:
        await line.served(line.published())
        line.engine.fails = True
        with pytest.raises(CanaryFailed):
            await line.load(line.published())
        new = line.published()
        with pytest.raises(BaseRefused):
            await line.load(new)
        await line.served(new, full=True)

    play(main)


def test_a_damaged_delta_changes_nothing_and_the_engine_takes_the_next(line: Line) -> None:
    async def main() -> None:
        await line.served(line.published())
        before, new = line.engine.model.content(), line.published()
        assert new.delta is not None
        digests = ("0" * 32, *new.delta.manifest.chunk_digests[1:])
        damaged = msgspec.structs.replace(new.delta.manifest, chunk_digests=digests)
        delta = msgspec.structs.replace(new.delta, manifest=damaged)
        with pytest.raises(WeightSyncFailed, match="digest of chunk 0"):
            await line.load(msgspec.structs.replace(new, delta=delta))
        assert line.engine.model.content() == before
        await line.served(new)

    play(main)


def test_a_base_that_is_not_compared_is_caught_by_the_digests_of_the_chunks() -> None:
    """The comparison is the first guard; rebuilt chunks are verified as received ones are."""
    model, engine = Model(1), Model(7)
    packer, source = DeltaPacker(enabled=True), ModuleSource(model, CHUNK_BYTES)
    other = packer.pack(source)
    model.step()
    packer.pack(source)
    model.step()
    new = packer.pack(source)
    assert new.delta is not None
    wrong = HeldRelease(new.delta.base, other.manifest, list(other.chunks))
    receiver, before = ModuleReceiver(engine), engine.content()
    receiver.begin(1, new.manifest)
    with pytest.raises(TransferRefused, match="digest of chunk 0"):
        receiver.apply(1, 0, rebuilt(1, wrong, new.manifest, new.delta.chunks)[0])
    receiver.abort()
    assert engine.content() == before


def test_a_session_that_still_sends_the_former_release_is_not_mixed_with_the_new_one() -> None:
    """The packer gives up the chunks of its base one by one; a snapshot being sent keeps its own."""
    model = Model(1)
    source = ModuleSource(model, CHUNK_BYTES)
    sender = GlooSender(source, host="127.0.0.1", incarnation="t", timeouts=PATIENT, delta=True)
    try:
        sender.publish(1)
        former = sender.snapshot
        assert former is not None
        model.step()
        sender.publish(2)
        digests = [xxhash.xxh3_128_hexdigest(np.asarray(each).data) for each in former.chunks]
        assert tuple(digests) == former.manifest.chunk_digests
    finally:
        sender.close()
