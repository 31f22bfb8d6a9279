"""Recipes written for one test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError

Write = Callable[..., Path]
Report = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def report(write: Write) -> Report:
    """The report on a recipe that is wrong, its path shortened to the file's name."""

    def report(text: str, *overrides: str, dry_run: bool = False) -> str:
        path = write(text)
        with pytest.raises(ConfigError) as caught:
            load_recipe(path, overrides, dry_run=dry_run)
        return str(caught.value).replace(str(path), "recipe.yaml")

    return report
