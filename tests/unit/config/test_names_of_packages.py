"""Names of samplers, losses, advantages and graders that another package brings."""

import sys
from pathlib import Path

import pytest

from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.sections.sampler import CustomSamplerConfig
from tests.support.installed_package import install_package

RECIPE = ("steps=2", "model.path=.")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    names = ("sampler.freshest", "loss.bounded", "advantage.centred", "grader.nearly")
    sources: dict[str, str] = dict.fromkeys(names, "PLUGIN = 1")
    install_package(tmp_path, "lab", sources)
    return tmp_path


def load(*overrides: str) -> RunConfig:
    return load_recipe(None, [*RECIPE, *overrides]).config


@pytest.mark.usefixtures("packages")
def test_a_name_becomes_the_target_of_its_entry_point_and_nothing_is_imported() -> None:
    config = load("sampler.name=freshest", "sampler.options.depth=2", "algorithm.advantage=centred")
    sampler = CustomSamplerConfig(target="lab_sampler_freshest:PLUGIN", options={"depth": 2})
    assert config.sampler == sampler
    assert config.algorithm.advantage_target == "lab_advantage_centred:PLUGIN"
    loss = load("algorithm.loss.name=bounded", "algorithm.loss.options.beta=0.1").algorithm.loss
    assert isinstance(loss, CustomLossConfig)
    assert loss.target == "lab_loss_bounded:PLUGIN"
    assert not any(name.startswith("lab_") for name in sys.modules)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("nearly", "lab_grader_nearly:PLUGIN"),
        ("math_verify", "math_verify"),
        ("mine:nearly", "mine:nearly"),
    ],
)
def test_a_grader_of_a_package_is_a_name_for_its_function(given: str, target: str) -> None:
    function = ("environment.name=function", "data.path=rows.jsonl")
    assert load(*function, f"environment.target={given}").environment.target == target


@pytest.mark.usefixtures("packages")
def test_a_name_that_is_close_to_one_of_a_package_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean `freshest`\?"):
        load("sampler.name=freshets")


@pytest.mark.usefixtures("packages")
def test_an_unknown_name_gets_the_usual_answer() -> None:
    with pytest.raises(
        ConfigError, match=r"sampler\.name = 'freshets': has to be: one of in_order"
    ):
        load("sampler.name=freshets")


def test_two_packages_with_one_name_are_a_problem_of_the_recipe(packages: Path) -> None:
    install_package(packages, "other", {"sampler.freshest": "PLUGIN = 2"})
    with pytest.raises(ConfigError, match=r"'freshest': lab and other each provide one"):
        load("sampler.name=freshest")
