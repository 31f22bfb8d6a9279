"""The recipes of docs/samplers.md are valid, and one step off is one version behind."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.config.sections.sampler import InOrderConfig
from tests.support.recipes import make_config

pytestmark = pytest.mark.plugins

PAGE = Path(__file__).parents[3] / "docs" / "samplers.md"


def read_recipes() -> list[dict[str, Any]]:
    """Each line of the first block, and the block of one step off."""
    first, *others = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [yaml.safe_load(line) for line in first.splitlines()]
    return lines + [yaml.safe_load(block) for block in others if "max_lookahead" in block]


def test_each_sampler_that_the_page_offers_is_valid() -> None:
    recipes = read_recipes()
    assert len(recipes) == 6
    for recipe in recipes:
        make_config("models/tiny-addition", **recipe)


def test_one_step_off_is_one_batch_and_one_version_behind() -> None:
    *_, recipe = read_recipes()
    config = make_config("models/tiny-addition", **recipe)
    sampler = config.sampler
    assert isinstance(sampler, InOrderConfig)
    assert (sampler.max_staleness, sampler.max_lookahead) == (1, 1)
    assert config.sync.mode == "drain"
    assert "one step off" in PAGE.read_text(encoding="utf-8")
