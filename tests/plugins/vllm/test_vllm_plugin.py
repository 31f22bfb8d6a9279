"""vLLM as a kind of engine: its actor, its environment variables, and names of its code in text."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from offbeat.config.engine_plugin import find_engine
from offbeat.config.mixture import sampling_identity
from offbeat.launch.cluster import engine_class
from offbeat.launch.environment import pass_on_variables
from offbeat.plugins.vllm.plugin import ENGINE
from tests.support.recipes import make_config

FOLDER = Path(__file__).parents[3] / "offbeat" / "plugins" / "vllm"


def test_the_actor_of_a_vllm_engine_comes_from_the_plugin() -> None:
    assert find_engine("vllm") is ENGINE
    assert engine_class("vllm").__module__ == "offbeat.plugins.vllm.engine_actor"


def test_engines_on_other_machines_get_the_variables_of_vllm() -> None:
    given = {"VLLM_LOGGING_LEVEL": "DEBUG", "SHELL": "bash"}
    assert pass_on_variables(given, {}).plain == {"VLLM_LOGGING_LEVEL": "DEBUG"}


@pytest.mark.parametrize(("kv", "name"), [("recompute", "de4a48c98532"), ("keep", "94e66abcaa7f")])
def test_stored_groups_of_earlier_runs_keep_the_name_of_their_settings(kv: str, name: str) -> None:
    generator = {"backend": "vllm", "vllm": {"kv": kv}}
    config = make_config(generator=generator)
    assert sampling_identity(config) == name


def test_each_module_that_is_named_in_text_exists() -> None:
    named = {
        name
        for file in FOLDER.glob("*.py")
        for name in re.findall(r'"(offbeat\.[a-z_.]+)\.[A-Z]\w+"', file.read_text())
    }
    assert "offbeat.plugins.vllm.worker_extension" in named
    assert [name for name in named if find_spec(name) is None] == []
