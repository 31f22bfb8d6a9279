"""Advice about an override that YAML cannot read is itself an override that it reads."""

import shlex
from pathlib import Path

import pytest

from offbeat.config.limits import freeze_patterns
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError


def advised(recipe: Path, override: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_recipe(recipe, [override])
    (problem,) = refused.value.problems
    (advice,) = shlex.split(problem.hint.partition(": ")[2].removesuffix("."))
    return advice


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.freeze=[model.layers.[0-7].*]", ("model.layers.[0-7].*",)),
        ("trainer.freeze=[*]", ("*",)),
        ("trainer.freeze=[*.bias, *norm*]", ("*.bias", "*norm*")),
    ],
)
def test_elements_of_a_list_are_quoted_and_then_read(
    tmp_path: Path, override: str, meant: tuple[str, ...]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 1\nmodel: {path: m}\n")
    advice = advised(recipe, override)
    assert freeze_patterns(load_recipe(recipe, [advice]).config) == meant


def test_a_text_is_quoted_as_a_whole(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 1\nmodel: {path: m}\n")
    assert advised(recipe, "name=*mine") == 'name="..."'
