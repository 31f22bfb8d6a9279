"""The canary of a release on the real embedded engine, and the bugs that digests do not see."""

import asyncio
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.sync import ObjectStoreSyncConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.module_server import ReleaseLoader
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import CanaryFailed, EngineUnavailable
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.weights import Canary, WeightRelease
from offbeat.trainers.senders import Canaries
from offbeat.trainers.torch import TorchTrainer
from offbeat.weight_sync import canary
from offbeat.weight_sync.dtypes import ITEMSIZE
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import ModuleTarget, Receiver
from offbeat.weight_sync.transport import PublishedRelease
from tests.support.engine_servers import (
    FENCE,
    TOLERANCE,
    load,
    release_with_canary,
    save_tiny_qwen3,
    with_engine,
)
from tests.support.plain_modules import ModuleSource
from tests.support.recipes import make_config


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output head is its embedding."""
    return save_tiny_qwen3(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def trainer_of(path: Path, dtype: str = "float32") -> TorchTrainer:
    model = ModelConfig.model_validate({"path": str(path), "dtype": dtype})
    return TorchTrainer(
        path, trainer=TorchTrainerConfig(), model=model, total_steps=10, max_model_len=128
    )


@torch.no_grad()
def train(trainer: TorchTrainer, seed: int, scale: float = 0.05) -> None:
    """Move every weight, as steps do, a little more."""
    torch.manual_seed(seed)
    for each in trainer.module.parameters():
        each.add_(scale * torch.randn_like(each))


def release(trainer: TorchTrainer, version: int) -> WeightRelease:
    """What a trainer's rank publishes."""
    source = ModuleSource(trainer.module, chunk_bytes=200_000)
    return release_with_canary(trainer, version, source)


async def generate(server: EmbeddedEngineServer, id_: str, tokens: int = 4) -> GenerateResult:
    asked = GenerateRequest(id_, (1, 2, 3), 1, SamplingParams(max_new_tokens=tokens, seed=1))
    return await server.generate(asked)


# --- the bugs -------------------------------------------------------------------------------------


class AdapterNeverApplied(EmbeddedEngineServer):
    """Weights reach a wrapper; the module that is computed with keeps those it was made with."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._module = type(self._module)(self._module.config)


class ScalesOneLayer(ModuleTarget):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._layer = module.get_parameter("model.layers.0.mlp.down_proj.weight")

    @torch.no_grad()
    def commit(self) -> None:
        super().commit()
        self._layer.mul_(2.0)


class LoaderCorruptsOneLayer(EmbeddedEngineServer):
    """All bytes arrive, and one layer is not what they say."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.corrupts = True

    async def _get_loader(self, epoch: int, manifest: Manifest) -> ReleaseLoader:
        if not self.corrupts:
            return await super()._get_loader(epoch, manifest)
        target = ScalesOneLayer(self._module)
        return ReleaseLoader(Receiver(target, self._name), target.read_back)


class OldHead(nn.Module):
    """An output head with a copy of the embedding that nobody updates."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.get_buffer("weight"))


class TiedHeadKeptOld(EmbeddedEngineServer):
    """The embedding is updated, the head that was tied to it is not."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        model = self._module
        assert isinstance(model, PreTrainedModel)
        model.set_output_embeddings(OldHead(model.get_input_embeddings().get_parameter("weight")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_computes_what_the_trainer_computes_passes_with_room_to_spare(
    tied: Path, dtype: str
) -> None:
    trainer = trainer_of(tied, dtype)

    async def use(server: EmbeddedEngineServer) -> None:
        for version in range(3):
            ack = await load(server, version + 1, release(trainer, version))
            assert ack.canary_gap is not None
            assert ack.canary_gap <= TOLERANCE[dtype] / 4
            assert (await generate(server, f"after {version}")).version_spans[0][0][0] == version
            train(trainer, version)

    with_engine(tied, use, dtype)


@pytest.mark.parametrize(
    "bug", [AdapterNeverApplied, LoaderCorruptsOneLayer, TiedHeadKeptOld], ids=lambda b: b.__name__
)
def test_a_bug_that_digests_do_not_see_is_caught_before_the_engine_serves(
    tied: Path, bug: type[EmbeddedEngineServer]
) -> None:
    trainer = trainer_of(tied)
    train(trainer, 7)

    async def use(server: EmbeddedEngineServer) -> None:
        with pytest.raises(CanaryFailed, match="and the trainer's is"):
            await load(server, 1, release(trainer, 1))
        state = await server.state(FENCE)
        assert (state.version, state.digest) == (None, None)
        with pytest.raises(EngineUnavailable):
            await generate(server, "too early")

    with_engine(tied, use, kind=bug)


def test_samples_that_run_when_a_canary_fails_are_lost_and_a_good_sync_heals_the_engine(
    tied: Path,
) -> None:
    trainer = trainer_of(tied)
    good = release(trainer, 0)
    train(trainer, 7)
    new = release(trainer, 1)

    async def use(server: EmbeddedEngineServer) -> None:
        assert isinstance(server, LoaderCorruptsOneLayer)
        server.corrupts = False
        await load(server, 1, good)
        running = asyncio.create_task(generate(server, "running", tokens=120))
        await asyncio.sleep(0)  # its turn: it is with the engine now
        server.corrupts = True
        with pytest.raises(CanaryFailed):
            await load(server, 2, new)
        with pytest.raises(EngineUnavailable, match="and the trainer's is"):
            await running
        server.corrupts = False
        assert (await load(server, 3, new)).canary_gap is not None
        after = await generate(server, "after", tokens=3)
        assert after.version_spans == (((1, len(after.token_ids)),),)
        assert np.isfinite(after.logprobs).all()

    with_engine(tied, use, kind=LoaderCorruptsOneLayer)


# --- the numbers ----------------------------------------------------------------------------------


def two_tokens(tolerance: float = 0.1) -> Canary:
    return Canary(((1, 2),), ((5, 6, 7),), ((-0.1, -3.0, -9.0),), tolerance)


@pytest.mark.parametrize(
    ("token", "logprob", "gap"),
    [
        (5, -0.1, 0.0),
        (5, -0.35, 0.25),
        (6, -3.0, 1.45),  # its logprob is right, but it is not the trainer's best token
        (9, -0.1, 8.9),  # not among those the trainer kept
        (5, float("nan"), float("inf")),
    ],
)
def test_a_gap_is_how_far_the_distributions_are_apart_at_least(
    token: int, logprob: float, gap: float
) -> None:
    answer = canary.CanaryAnswer(token, logprob)
    assert canary.gap(two_tokens(), 0, answer) == pytest.approx(gap)


def answers_off_by(gap: float) -> list[canary.CanaryAnswer]:
    return [canary.CanaryAnswer(5, -0.1 - gap)]


def test_an_engine_may_be_five_times_as_far_away_as_with_its_first_release() -> None:
    checks, allowed = canary.CanaryChecks("generator-0"), two_tokens(0.25)
    assert checks.check(allowed, answers_off_by(0.06), epoch=1, version=0) == pytest.approx(0.06)
    assert checks.check(allowed, answers_off_by(0.29), epoch=2, version=1) == pytest.approx(0.29)
    with pytest.raises(CanaryFailed, match=r"0\.31 nats apart, 0\.3 are allowed"):
        checks.check(allowed, answers_off_by(0.31), epoch=3, version=2)


def test_a_first_release_raises_the_tolerance_to_its_double_at_most() -> None:
    checks, allowed = canary.CanaryChecks("generator-0"), two_tokens(0.25)
    checks.check(allowed, answers_off_by(0.24), epoch=1, version=0)
    with pytest.raises(CanaryFailed, match=r"0\.5 are allowed"):
        checks.check(allowed, answers_off_by(0.51), epoch=2, version=1)


def test_a_first_release_is_held_to_the_tolerance_and_a_small_gap_narrows_nothing() -> None:
    checks, allowed = canary.CanaryChecks("generator-0"), two_tokens(0.25)
    with pytest.raises(CanaryFailed, match=r"0\.25 are allowed"):
        checks.check(allowed, answers_off_by(0.29), epoch=1, version=0)
    checks.check(allowed, answers_off_by(0.01), epoch=2, version=0)
    assert checks.check(allowed, answers_off_by(0.24), epoch=3, version=1) == pytest.approx(0.24)


def test_a_tolerance_of_the_recipe_stays(tied: Path) -> None:
    sync = {"canary_tolerance": 0.07}
    config = make_config(tied, sync=sync)
    trainer = trainer_of(tied)
    published = PublishedRelease(release(trainer, 0).manifest, "", ())
    fixed = Canaries(config).add(published, trainer).manifest.canary
    assert fixed is not None
    assert fixed.tolerance == 0.07
    checks, allowed = canary.CanaryChecks("generator-0"), replace(two_tokens(0.07), is_fixed=True)
    checks.check(allowed, answers_off_by(0.06), epoch=1, version=0)
    with pytest.raises(CanaryFailed, match=r"0\.07 are allowed"):
        checks.check(allowed, answers_off_by(0.08), epoch=2, version=1)
    assert fixed.is_fixed


def test_the_tolerance_is_that_of_the_coarsest_type() -> None:
    assert canary.tolerance("float32", None) == canary.TOLERANCE_FLOAT32
    assert canary.tolerance("float32", "bfloat16") == canary.TOLERANCE_16_BIT
    assert canary.tolerance("bfloat16", None) == canary.TOLERANCE_16_BIT
    quantized = "bfloat16", None, "float8_e4m3fn"
    assert canary.tolerance(*quantized) == canary.TOLERANCE_16_BIT
    assert canary.tolerance(*quantized, rounds_activations=True) == canary.TOLERANCE_8_BIT


@pytest.mark.parametrize("key", ["model.dtype", "sync.wire_dtype"])
def test_every_type_that_a_recipe_can_name_has_a_tolerance(key: str) -> None:
    section, name = key.split(".")
    allowed = (
        {"model": ModelConfig, "sync": ObjectStoreSyncConfig}[section].model_fields[name].annotation
    )
    names = [each for part in (allowed, *get_args(allowed)) for each in get_args(part)]
    dtypes = [each for each in names if isinstance(each, str)]
    assert "bfloat16" in dtypes
    for dtype in dtypes:
        rounded = torch.finfo(getattr(torch, dtype)).bits < torch.finfo(torch.float32).bits
        expected = canary.TOLERANCE_16_BIT if rounded else canary.TOLERANCE_FLOAT32
        assert canary.tolerance(dtype, None) == expected


def test_the_sizes_of_types_are_those_of_torch() -> None:
    for dtype, size in ITEMSIZE.items():
        assert getattr(torch, dtype).itemsize == size


def test_the_prompts_of_a_vocabulary_are_always_the_same_and_within_it() -> None:
    for vocabulary in (13, 64, 151_936):
        made = canary.prompts(vocabulary)
        assert made == canary.prompts(vocabulary)
        assert len(set(made)) == canary.PROMPTS
        assert all(0 <= token < vocabulary for prompt in made for token in prompt)
