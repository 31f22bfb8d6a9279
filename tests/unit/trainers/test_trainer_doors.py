"""Backends and parts of the trainer that plug-ins bring, as the core finds them."""

import pytest

from offbeat.config.run import RunConfig
from offbeat.doors import NoSuchPlugin
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.torch_trainer import TorchParts
from offbeat.trainers.trainer_plugin import (
    choose_trainer,
    find_parts,
    find_trainer,
    known_trainers,
    replace_parts,
)
from tests.support.recipes import make_config


def recipe(**trainer: object) -> RunConfig:
    return make_config(trainer={"device": "cpu", **trainer})


@pytest.mark.parametrize("backend", ["torch", "stub"])
def test_a_backend_of_the_core_is_no_plugin(backend: str) -> None:
    assert find_trainer(backend) is None


@pytest.mark.plugins
def test_a_backend_that_no_package_brings_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NoSuchPlugin, match=r"trainer torhc: .*Use one of megatron, or install"):
        find_trainer("torhc")


@pytest.mark.plugins
def test_the_section_of_a_plugin_says_how_its_ranks_share_the_model() -> None:
    sizes = {"tensor_parallel": 2, "pipeline_parallel": 3, "context_parallel": 5}
    trainer = recipe(backend="megatron", **sizes, expert_tensor_parallel=2).trainer
    assert isinstance(trainer, known_trainers()["megatron"].section)
    assert (trainer.stages, trainer.ranks_of_row, trainer.ranks_of_expert) == (3, 5, 2)
    one = known_trainers()["megatron"].section()
    assert (one.stages, one.ranks_of_row, one.ranks_of_expert) == (1, 1, 1)


def test_a_recipe_without_a_part_has_the_trainer_of_its_backend() -> None:
    assert find_parts(recipe()) == []
    assert choose_trainer(recipe(), 0, TorchTrainer) is TorchTrainer


@pytest.mark.plugins
def test_a_part_replaces_parts_of_the_trainer_of_each_rank() -> None:
    config, default = recipe(encoder={}), TorchParts()
    assert [part.key for part in find_parts(config)] == ["encoder"]
    for rank in range(2):
        parts = replace_parts(config, rank, default)
        assert parts.loader is not default.loader
        assert parts.passes is not default.passes
        assert parts.state is not default.state
        assert parts.trained is default.trained
        assert choose_trainer(config, rank, TorchTrainer) is TorchTrainer
