"""Releases that hold adapters alone, on the real embedded engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.messages.failures import WeightSyncFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.weights import WeightRelease
from offbeat.plugins.lora.adapters import Adapters
from offbeat.trainers.parts import TrainedWeights
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.torch_trainer import TorchParts
from offbeat.transfer_queue.tensordict_codec import build_chunk
from offbeat.weight_sync.chunks import GatheredSource
from offbeat.weight_sync.manifest import Adapter, release_digest
from tests.support.engine_servers import (
    FENCE,
    load,
    release_with_canary,
    save_tiny_qwen3,
    with_engine,
)

pytest.importorskip("peft", reason="the extra `lora` is not installed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def trainer_of(path: Path, dtype: str = "float32", targets: tuple[str, ...] = ()) -> TorchTrainer:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": targets}
    trainer = TorchTrainer(
        path,
        parts=TorchParts(trained=Adapters),
        trainer=TorchTrainerConfig.model_validate({"lora": lora}),
        model=ModelConfig.model_validate({"path": str(path), "dtype": dtype}),
        total_steps=10,
        max_model_len=128,
    )
    move(trainer, seed=1)
    return trainer


def adapters_of(trainer: TorchTrainer) -> Adapters:
    assert isinstance(trainer.trained, Adapters)
    return trainer.trained


@torch.no_grad()
def move(trainer: TorchTrainer, seed: int) -> None:
    """Move every adapter, as steps do, but further."""
    torch.manual_seed(seed)
    for each in trainer.module.parameters():
        if each.requires_grad:
            each.add_(0.05 * torch.randn_like(each))


def release(
    trainer: TorchTrainer,
    version: int,
    holding: TrainedWeights | None = None,
    adapter: Adapter | None = None,
) -> WeightRelease:
    """What a trainer's rank publishes: its adapters, unless it is ``holding`` something else."""
    weights = holding or trainer.weights
    of = None if holding else adapter or adapters_of(trainer).adapter
    source = GatheredSource(weights.metas(), weights.iterate, 4_000, adapter=of)
    return release_with_canary(trainer, version, source)


async def generate(server: EmbeddedEngineServer, number: int) -> GenerateResult:
    asked = GenerateRequest(
        f"r{number}", (1, 2, 3), 2, SamplingParams(max_new_tokens=16, seed=number)
    )
    return await server.generate(asked)


def trainers_logprobs(trainer: TorchTrainer, result: GenerateResult) -> np.ndarray:
    offsets = result.offsets
    group: Any = {
        "prompt_ids": np.array((1, 2, 3), np.int32),
        "response_ids": np.array(result.token_ids, np.int32),
        "response_offsets": offsets,
    }
    (columns,) = trainer.prepare_logprobs(
        build_chunk([group]), policy=True, reference=False, temperature=1.0
    )
    return columns["policy_logprobs"]


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_an_engine_serves_adapters_with_the_logprobs_of_the_trainer(
    tiny: Path, dtype: str, allowed: float
) -> None:
    trainer = trainer_of(tiny, dtype)

    async def use(server: EmbeddedEngineServer) -> None:
        for epoch in (1, 2, 3):
            new = release(trainer, epoch)
            ack = await load(server, epoch, new)
            assert (ack.version, ack.digest) == (epoch, new.digest)
            assert ack.canary_gap is not None
            result = await generate(server, epoch)
            gap = np.abs(trainers_logprobs(trainer, result) - np.array(result.logprobs))
            assert gap.max() < allowed
            move(trainer, seed=epoch + 1)

    with_engine(tiny, use, dtype)


def test_a_release_of_adapters_has_the_bytes_of_the_adapters(tiny: Path) -> None:
    trainer = trainer_of(tiny)
    held = sum(each.nbytes for _, each in trainer.weights.iterate())
    padding = 64 * len(list(trainer.weights.metas()))
    assert held <= release(trainer, 1).nbytes <= held + padding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_many_releases_an_engine_serves_what_a_new_one_serves(tiny: Path, dtype: str) -> None:
    trainer, last = trainer_of(tiny, dtype), list[WeightRelease]()
    tokens = list[tuple[tuple[int, ...], tuple[float, ...]]]()

    async def many(server: EmbeddedEngineServer) -> None:
        for epoch in (1, 2, 3):
            move(trainer, seed=epoch)
            last.append(release(trainer, epoch))
            await load(server, epoch, last[-1])
        await one(server, 4)

    async def one(server: EmbeddedEngineServer, epoch: int = 1) -> None:
        await load(server, epoch, last[-1])
        result = await generate(server, 7)
        tokens.append((tuple(result.token_ids), tuple(result.logprobs)))

    with_engine(tiny, many, dtype)
    with_engine(tiny, one, dtype)
    assert tokens[0] == tokens[1]


def test_a_module_that_the_next_release_does_not_adapt_serves_its_base_again(tiny: Path) -> None:
    wide, narrow = trainer_of(tiny), trainer_of(tiny, targets=("q_proj",))

    async def use(server: EmbeddedEngineServer) -> None:
        await load(server, 1, release(wide, 1))
        await load(server, 2, release(narrow, 2))  # its canary would fail over what is left of wide

    with_engine(tiny, use)


def test_adapters_of_another_base_are_refused_and_the_old_version_goes_on(
    tmp_path: Path, tiny: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    model.model.embed_tokens.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path)
    ours, others = trainer_of(tiny), trainer_of(tmp_path)

    async def use(server: EmbeddedEngineServer) -> None:
        await load(server, 1, release(ours, 1))
        with pytest.raises(WeightSyncFailed, match="base of the adapters"):
            await load(server, 2, release(others, 2))
        assert (await server.state(FENCE)).version == 1

    with_engine(tiny, use)


def test_adapters_after_a_full_release_are_refused_because_their_base_is_gone(tiny: Path) -> None:
    trainer = trainer_of(tiny)

    async def use(server: EmbeddedEngineServer) -> None:
        await load(server, 1, release(trainer, 1, holding=adapters_of(trainer).merged))
        with pytest.raises(WeightSyncFailed, match="base of the adapters is a full release"):
            await load(server, 2, release(trainer, 2))
        assert (await server.state(FENCE)).version == 1

    with_engine(tiny, use)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_release_serves_what_separate_adapters_serve(tiny: Path, dtype: str) -> None:
    trainer, served = trainer_of(tiny, dtype), list[tuple[float, ...]]()

    async def separate(server: EmbeddedEngineServer) -> None:
        await load(server, 1, release(trainer, 1))
        served.append(tuple((await generate(server, 7)).logprobs))

    async def merged(server: EmbeddedEngineServer) -> None:
        await load(server, 1, release(trainer, 1, holding=adapters_of(trainer).merged))
        served.append(tuple((await generate(server, 7)).logprobs))

    with_engine(tiny, separate, dtype)
    with_engine(tiny, merged, dtype)
    assert served[0] == served[1]


def test_a_release_that_lacks_one_half_of_an_adapter_is_refused(tiny: Path) -> None:
    trainer = trainer_of(tiny)

    class Half:
        def metas(self) -> Any:
            return (
                each for each in trainer.weights.metas() if "0.mlp.up_proj.lora_B" not in each[0]
            )

        def iterate(self) -> Any:
            return (
                each for each in trainer.weights.iterate() if "0.mlp.up_proj.lora_B" not in each[0]
            )

        def local_tensors(self) -> Any:
            return {}

    source = GatheredSource(
        Half().metas(), Half().iterate, 4_000, adapter=adapters_of(trainer).adapter
    )
    chunks, digests = zip(*source.chunks(), strict=True)
    manifest = source.manifest.seal(digests)
    half = WeightRelease(
        1, release_digest(manifest, digests), manifest, chunks, manifest.nbytes, None
    )

    async def use(server: EmbeddedEngineServer) -> None:
        with pytest.raises(WeightSyncFailed, match=r"without 1 tensors: .*up_proj\.lora_B"):
            await load(server, 1, half)

    with_engine(tiny, use)
