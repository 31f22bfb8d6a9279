"""A trainer's model, a sender whose releases have deltas, and an engine that takes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from reshard_bench import Held, ReshardBench
from torch import nn

from offbeat.config.sections.generator import EmbeddedGeneratorConfig, StubConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.fakes.engine import StubEngine
from offbeat.generators.engine_server import EngineServer, LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import CanaryFailed
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.plugins.reshard.messages import TransferTimeouts
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.transport import (
    PublishedRelease,
    Sender,
    make_release,
    with_handles_apart,
)
from tests.support.loading import load, load_full
from tests.support.plain_modules import ModuleReceiver

BUCKET_BYTES = 2048
PATIENT = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=60.0)


class TrainedModel(nn.Module):
    """Three chunks in two types, one of which is never trained."""

    def __init__(self, seed: int, rows: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.randn(rows, 30).bfloat16())
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


class LoadingEngine(EngineServer):
    """Engine server that loads releases into a module; the next canary fails if it is told so."""

    def __init__(self, rows: int = 64) -> None:
        self.model, self.fails = TrainedModel(7, rows), False
        self.receiver = ModuleReceiver(self.model)
        stub = StubEngine(StubConfig(), name="g0", incarnation="g0-1", seed=0)
        model, generator = ModelConfig(path="m"), EmbeddedGeneratorConfig()
        spec = EngineSpec("g0", model, generator, StubConfig(), 0, "unused", keeps_base=True)
        super().__init__(spec, stub, "g0-1")

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        chunks = await self._bring(incoming)
        epoch, release = incoming.epoch, incoming.release
        self.receiver.begin(epoch, release.manifest)
        for index, chunk in enumerate(chunks):
            self.receiver.apply(epoch, index, chunk)
        self.receiver.verify(release.digest)
        self.receiver.commit(release.version)
        if self.fails:
            self.fails = False
            raise CanaryFailed("g0", epoch, release.version, 1, -1.0, -2.0, 1.0, 0.1)
        return LoadOutcome(0.0, None)

    async def _bring(self, incoming: IncomingRelease) -> Sequence[BucketMemory]:
        return await incoming.bring()


class WholeTensorEngine(LoadingEngine):
    """Engine whose loader takes no regions of tensors."""

    async def _bring(self, incoming: IncomingRelease) -> Sequence[BucketMemory]:
        chunks = await incoming.bring_whole()
        assert not incoming.release.manifest.pieces, "its loader was given regions"
        return chunks


class Ranks:
    """The senders of all ranks of a model, which publish together."""

    handles = delta_handles = 1

    def __init__(
        self,
        model: nn.Module,
        ranks: int = 2,
        held: Held | None = None,
        timeouts: TransferTimeouts = PATIENT,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.bench = ReshardBench(
            ranks,
            held,
            models=[model] * ranks,
            bucket_bytes=bucket_bytes,
            timeouts=timeouts,
            delta=True,
        )

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        assert layout is None, "give it to the bench"
        return self.bench.publish(version)

    def forget(self) -> None:
        for each in self.bench.senders:
            each.forget()

    def close(self) -> None:
        self.bench.close()


@dataclass
class Line:
    """A trainer's model, its sender, and an engine."""

    sender: Sender
    model: TrainedModel
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
        return make_release(self.version, published, tuple(handles), count)

    async def load(self, release: WeightRelease, *, full: bool = False) -> WeightsAck:
        """Call the engine as its port does."""
        self.epoch += 1
        return await (load_full if full else load)(self.engine, self.epoch, release)

    async def served(self, release: WeightRelease, *, full: bool = False) -> None:
        ack = await self.load(release, full=full)
        assert (ack.version, ack.digest) == (release.version, release.digest)
        assert self.engine.model.content() == self.model.content()
