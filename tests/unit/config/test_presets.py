"""A preset is written out when a recipe is read; what a recipe says itself wins."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from offbeat.config.crosschecks import clashes
from offbeat.config.loader import LoadedRecipe, load_recipe
from offbeat.config.presets import PRESETS, PresetName, with_preset
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.config.sections.algorithm import AlgorithmConfig
from offbeat.config.sections.loss import CispoLossConfig, GspoLossConfig
from offbeat.config.yaml_text import to_yaml

ROOT = Path(__file__).resolve().parents[3]


def algorithm(**section: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(section)


def load(folder: Path, recipe: dict[str, Any], *overrides: str) -> LoadedRecipe:
    path = folder / "recipe.yaml"
    whole = {"steps": 1, "model": {"path": "m"}, **recipe}
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    return load_recipe(path, overrides)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_configuration_that_can_work(name: str) -> None:
    values = {"steps": 1, "model": {"path": "m"}, "algorithm": {"preset": name}}
    assert not list(clashes(RunConfig.model_validate(values)))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_its_table_says(name: str) -> None:
    made, table = algorithm(preset=name).model_dump(), PRESETS[name]
    assert made["advantage"] == table["advantage"]
    assert {key: made["loss"][key] for key in table["loss"]} == dict(table["loss"])


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_has_every_preset_as_it_is(name: str) -> None:
    preset = PRESETS[name]
    loss = " ".join(
        f"{key}={list(value) if isinstance(value, tuple) else value}"  # pyright: ignore[reportUnknownArgumentType]
        for key, value in preset["loss"].items()
    )
    row = f"| `{name}` | `{preset['advantage']}` | `{loss}` |"
    assert row in (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_every_preset_can_be_named() -> None:
    assert set(get_args(PresetName)) == set(PRESETS)


def test_only_the_defaults_of_nemo_rl_ask_for_a_reference_model() -> None:
    assert [name for name in PRESETS if algorithm(preset=name).loss.kl_coef] == ["nemo_rl_default"]


def test_without_a_preset_nothing_is_filled_in() -> None:
    assert algorithm() == AlgorithmConfig()
    assert algorithm(preset=None, advantage="rloo").loss == AlgorithmConfig().loss


def test_an_explicit_key_beside_a_preset_wins() -> None:
    made = algorithm(preset="gspo", advantage="rloo", loss={"clip_high": 0.01, "kl_coef": 0.1})
    assert isinstance(made.loss, GspoLossConfig)
    assert (made.advantage, made.loss.name, made.loss.clip_low) == ("rloo", "gspo", 3e-4)
    assert (made.loss.clip_high, made.loss.kl_coef) == (0.01, 0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_configuration_is_explicit_and_loads_as_itself(
    name: str, tmp_path: Path
) -> None:
    config = load(tmp_path, {"algorithm": {"preset": name}}).config
    text = to_yaml(config, {})
    (tmp_path / "resolved.yaml").write_text(text, encoding="utf-8")
    assert load_recipe(tmp_path / "resolved.yaml").config == config
    without = yaml.safe_load(text)["algorithm"]
    del without["preset"]
    assert algorithm(**without).loss == config.algorithm.loss


def test_another_preset_over_a_resolved_configuration_starts_afresh(tmp_path: Path) -> None:
    resolved = yaml.safe_load(to_yaml(load(tmp_path, {"algorithm": {"preset": "mis"}}).config, {}))
    loaded = load(tmp_path, resolved, "algorithm.preset=gspo")
    assert loaded.config.algorithm == algorithm(preset="gspo")
    assert any(each.startswith("algorithm.loss (") for each in loaded.dropped)


def test_a_preset_over_a_recipe_without_one_starts_afresh(tmp_path: Path) -> None:
    recipe = {"algorithm": {"advantage": "grpo", "loss": {"clip_low": 0.2, "clip_high": 0.3}}}
    loaded = load(tmp_path, recipe, "algorithm.preset=gspo", "algorithm.loss.kl_coef=0.5")
    assert loaded.config.algorithm == algorithm(preset="gspo", loss={"kl_coef": 0.5})


def test_the_same_preset_again_drops_nothing(tmp_path: Path) -> None:
    recipe = {"algorithm": {"preset": "cispo", "loss": {"clip_high": 2.0}}}
    loaded = load(tmp_path, recipe, "algorithm.preset=cispo")
    assert not loaded.dropped
    loss = loaded.config.algorithm.loss
    assert isinstance(loss, CispoLossConfig) and loss.clip_high == 2


def test_a_preset_that_does_not_exist_is_reported_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean `gspo`"):
        load(tmp_path, {"algorithm": {"preset": "gsppo"}})


@pytest.mark.parametrize("given", [None, 3, [], {"preset": 3}, {"preset": "x", "loss": 4}])
def test_what_makes_no_sense_is_left_to_the_model(given: object) -> None:
    assert with_preset(given) == given
