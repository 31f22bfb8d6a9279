"""The table of verl's defaults in docs/coming-from.md names real keys, and the defaults here."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.config.loader import load_recipe
from offbeat.config.peer_keys import find_note, matching_keys
from offbeat.config.problems import ConfigError
from tests.support.recipes import make_config

PAGE = Path(__file__).parents[3] / "docs" / "coming-from.md"


def read_rows() -> list[list[str]]:
    """The cells of each row of the table."""
    section = PAGE.read_text(encoding="utf-8").partition("## verl's defaults")[2]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.plugins
def test_the_defaults_in_the_table_are_the_defaults_of_a_recipe() -> None:
    values: Any = make_config().model_dump()
    assert len(read_rows()) == 9
    for peer, _, ours, default in read_rows():
        value = values
        for part in ours.split("."):
            value = value[part]
        assert value == yaml.safe_load(default), ours
        assert ours in matching_keys(peer, least=2) or ours in find_note(peer), peer


@pytest.mark.parametrize("name", ["run_verl.sh", "run_verl"])
def test_a_shell_script_is_refused_with_the_way_to_translate_its_settings(
    tmp_path: Path, name: str
) -> None:
    script = tmp_path / name
    script.write_text("#!/bin/bash\nset -x\npython3 -m verl.trainer.main_ppo a.b=1 $@\n")
    with pytest.raises(ConfigError, match="a shell script is no recipe") as refused:
        load_recipe(script)
    assert "pass them as arguments after a recipe" in str(refused.value)
