"""A release of an image-text model reaches the vision tower of an engine, and its checks see that."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import CanaryFailed
from offbeat.messages.generation import GenerateRequest, SamplingParams
from offbeat.messages.weights import WeightsAck
from offbeat.models.media_canaries import canary_media, canary_prompts
from offbeat.trainers.expert_names import AS_THEY_ARE
from offbeat.trainers.receiver_names import names_for_module
from offbeat.trainers.torch import TorchTrainer
from tests.support.engine_servers import load, release_with_canary, with_engine
from tests.support.image_text_models import (
    logprobs_with_features_in_the_prompt_alone,
    pictures,
    prompt_with,
)
from tests.support.plain_modules import ModuleSource


class TowerKeptOld(EmbeddedEngineServer):
    """The tower's weights reach a module that nothing computes with."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        model = self._module
        other = type(model)(model.config).eval()
        other.load_state_dict(model.state_dict())
        text: nn.Module = model.get_submodule("model.text_model")
        other.get_submodule("model").register_module("text_model", text)
        other.register_module("lm_head", model.get_submodule("lm_head"))
        self._module = other


@pytest.fixture
def trainer(idefics3: Path) -> TorchTrainer:
    return TorchTrainer(
        idefics3,
        trainer=TorchTrainerConfig(),
        model=ModelConfig(path=str(idefics3), dtype="float32"),
        total_steps=10,
        max_model_len=128,
    )


@torch.no_grad()
def move(trainer: TorchTrainer, part: str) -> None:
    """Move the weights of a part of the model, as steps do."""
    torch.manual_seed(1)
    for name, each in trainer.module.named_parameters():
        if part in name:
            each.add_(0.1 * torch.randn_like(each))


async def publish(server: EmbeddedEngineServer, trainer: TorchTrainer, version: int) -> WeightsAck:
    source = ModuleSource(trainer.module, chunk_bytes=200_000)
    prompts = canary_prompts(trainer.vocabulary, trainer.media_rules)
    release = release_with_canary(trainer, version, source, prompts)
    return await load(server, version + 1, release)


def test_an_engine_samples_behind_pictures_with_the_tower_that_was_released(
    idefics3: Path, trainer: TorchTrainer
) -> None:
    prompt, media = prompt_with(1, 5, 6), pictures(1)
    asked = GenerateRequest("one", prompt, 2, SamplingParams(max_new_tokens=6, seed=1), media)

    async def use(server: EmbeddedEngineServer) -> None:
        assert (await publish(server, trainer, 0)).canary_gap is not None
        move(trainer, "vision_model")
        move(trainer, "connector")
        ack = await publish(server, trainer, 1)
        assert ack.canary_gap is not None
        assert ack.canary_gap < 1e-4
        result = await server.generate(asked)
        for first, end in itertools.pairwise(result.offsets):
            tokens = result.token_ids[first:end].tolist()
            with torch.no_grad():
                want = logprobs_with_features_in_the_prompt_alone(
                    trainer.module, prompt, tokens, media
                )
            np.testing.assert_allclose(result.logprobs[first:end], want, atol=2e-6, rtol=0)
        served = await server.served_weights()
        assert not served.differences

    with_engine(idefics3, use)


def test_the_canary_sees_a_tower_that_kept_its_old_weights(
    idefics3: Path, trainer: TorchTrainer
) -> None:
    async def use(server: EmbeddedEngineServer) -> None:
        move(trainer, "text_model")
        assert (await publish(server, trainer, 0)).canary_gap is not None
        move(trainer, "vision_model")
        with pytest.raises(CanaryFailed):
            await publish(server, trainer, 1)

    with_engine(idefics3, use, kind=TowerKeptOld)


def test_a_resumed_trainer_has_the_tower_and_the_projector_of_its_checkpoint(
    trainer: TorchTrainer, tmp_path: Path
) -> None:
    initial = trainer.weights_digest()
    move(trainer, "vision_model")
    move(trainer, "connector")
    trained = trainer.weights_digest()
    trainer.save_state(tmp_path)
    trainer.reset()
    assert trainer.weights_digest() == initial != trained
    trainer.load_state(tmp_path)
    assert trainer.weights_digest() == trained


def test_a_release_has_every_weight_that_the_engine_loads(
    idefics3: Path, trainer: TorchTrainer
) -> None:
    metas = list(trainer.weights.metas())
    assert names_for_module(idefics3, metas, remote_code=False) is AS_THEY_ARE
    for part in ("vision_model", "connector", "text_model", "lm_head"):
        assert any(part in name for name, _, _ in metas)


def test_canary_prompts_are_of_equal_length_and_some_have_a_picture(trainer: TorchTrainer) -> None:
    rules = trainer.media_rules
    made = canary_prompts(trainer.vocabulary, rules)
    assert len({len(each) for each in made}) == 1
    with_pictures = [each is not None for each in canary_media(rules, made)]
    assert with_pictures == [rules.placeholder in each for each in made]
    assert set(with_pictures) == {True, False}
