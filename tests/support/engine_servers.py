"""The server of an embedded engine, and releases with canaries for it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from offbeat.config.sections.generator import EmbeddedGeneratorConfig, StubConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.messages.fences import Fence
from offbeat.messages.weights import Canary, WeightRelease, WeightsAck
from offbeat.trainers.torch import TorchTrainer
from offbeat.weight_sync import canary
from offbeat.weight_sync.chunks import GatheredSource
from offbeat.weight_sync.manifest import release_digest
from tests.support.trainer_fixtures import SIZES

FENCE: Final = Fence("run", 1)
TOLERANCE: Final = {"float32": canary.TOLERANCE_FLOAT32, "bfloat16": canary.TOLERANCE_16_BIT}
Use = Callable[[EmbeddedEngineServer], Awaitable[None]]


def save_tiny_qwen3(path: Path, **settings: Any) -> Path:
    """Save a random model of two layers, whose every weight matters to its logprobs."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **settings})).save_pretrained(path)
    return path


def with_engine(
    model: Path,
    use: Use,
    dtype: str = "float32",
    kind: type[EmbeddedEngineServer] = EmbeddedEngineServer,
) -> None:
    """Run ``use`` on the server of a new engine, and close it."""
    spec = EngineSpec(
        name="generator-0",
        model=ModelConfig.model_validate({"path": str(model), "dtype": dtype}),
        generator=EmbeddedGeneratorConfig(max_model_len=128),
        stub=StubConfig(),
        seed=0,
        run_dir="unused",
    )

    async def main() -> None:
        server = kind(spec)
        try:
            await use(server)
        finally:
            await server.close()

    asyncio.run(main())


def release_with_canary(
    trainer: TorchTrainer,
    version: int,
    source: GatheredSource,
    prompts: tuple[tuple[int, ...], ...] | None = None,
) -> WeightRelease:
    """Return what a trainer's rank publishes of ``source``; ``prompts``: None for those of text."""
    chunks, digests = zip(*source.chunks(), strict=True)
    asked = canary.prompts(trainer.vocabulary) if prompts is None else prompts
    dtype = str(trainer.module.dtype).removeprefix("torch.")
    made = Canary(asked, *trainer.top_logprobs(asked, canary.KEPT), TOLERANCE[dtype])
    manifest = msgspec.structs.replace(source.manifest.seal(digests), canary=made)
    digest = release_digest(manifest, digests)
    return WeightRelease(version, digest, manifest, chunks, manifest.nbytes, made)


async def load(server: EmbeddedEngineServer, epoch: int, new: WeightRelease) -> WeightsAck:
    """Load a release as the controller's adapter does."""
    return await server.load(FENCE, epoch, new.without_handles(), *new.handles)
