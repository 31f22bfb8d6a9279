"""A kind of engine that another package brings: its section, its rules and its actor."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from offbeat.config.engine_plugin import EnginePlugin, find_engine, known_engines
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.config.yaml_text import to_yaml
from offbeat.launch.cluster import engine_class
from tests.support.installed_package import install_package, module_of

RECIPE = ("steps=2", "model.path=.", "generator.backend=rapid")
ENGINE = """
from typing import Literal

from offbeat.config.base import Config
from offbeat.config.problems import Clash
from offbeat.config.engine_plugin import EnginePlugin
from offbeat.config.sections.generator import PluginGeneratorConfig


class Rapid(Config):
    depth: int = 1
    '''Depth of the drafts.'''


class RapidConfig(PluginGeneratorConfig):
    '''Engines of somebody else.'''

    backend: Literal["rapid"] = "rapid"
    '''Sampling backend.'''

    rapid: Rapid = Rapid()
    '''Settings of these engines.'''

    @property
    def sampling_settings(self):
        return {"depth": self.rapid.depth}


class RapidPlugin(EnginePlugin):
    section = RapidConfig

    def server_class(self):
        return dict

    def actor_class(self):
        return dict

    def find_clashes(self, config):
        if config.generator.rapid.depth > config.generator.max_model_len:
            yield Clash(("generator.rapid.depth",), "no draft is as long", "Lower it.")


PLUGIN = RapidPlugin()
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    install_package(tmp_path, "racer", {"engine.rapid": ENGINE})
    return tmp_path


def load(*overrides: str) -> RunConfig:
    return load_recipe(None, [*RECIPE, *overrides]).config


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(*overrides)
    return [f"{each.key}: {each.message}" for each in refused.value.problems]


def section(config: RunConfig) -> dict[str, object]:
    return config.model_dump()["generator"]


def test_a_recipe_gets_the_section_of_the_package_with_its_defaults() -> None:
    config = load("generator.rapid.depth=3", "generator.engines=2")
    assert type(config.generator).__module__ == module_of("racer", "engine.rapid")
    assert section(config)["rapid"] == {"depth": 3}
    assert (config.generator.engines, section(config)["max_sequences"]) == (2, 256)
    assert engine_class(config.generator.backend) is dict


def test_the_resolved_recipe_loads_as_an_equal_one_also_in_another_process(tmp_path: Path) -> None:
    config = load("generator.rapid.depth=3")
    assert RunConfig.model_validate(config.model_dump()) == config
    assert RunConfig.model_validate({**dict(config), "steps": 2}) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 -- written here
    recipe = tmp_path / "resolved.yaml"
    recipe.write_text(to_yaml(config, {}))
    assert load_recipe(recipe).config.generator == config.generator


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["generator.rapid.depth=deep"], "generator.backend: generator.rapid.depth: Input should"),
        (["generator.rapid.deep=1"], "generator.backend: generator.rapid.deep: Extra inputs"),
        (["generator.engines=0"], "generator.engines: has to be: integer, at least 1"),
        (["generator.rapids=1"], "generator.rapids: unknown key"),
        (["generator.depth=1"], "generator.depth: unknown key"),
        (["generator.vllm.kv=keep"], "generator.vllm: unknown key: generator.backend=rapid has no"),
        (["generator.rapid.depth=999"], "generator.rapid.depth: no draft is as long"),
        (["runtime=local"], "runtime.backend: runtime.backend=local cannot run with generator.ba"),
    ],
)
def test_a_wrong_value_is_reported_by_its_key(overrides: Sequence[str], problem: str) -> None:
    (found,) = problems(*overrides)
    assert found.startswith(problem)


def test_keys_of_another_kind_are_left_behind_by_an_override(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "steps: 2\nmodel: {path: .}\ngenerator: {backend: embedded, share_weights: true, engines: 2}"
    )
    loaded = load_recipe(recipe, ["generator.backend=rapid"])
    assert loaded.config.generator.engines == 2
    assert [key.split(" ")[0] for key in loaded.dropped] == ["generator.share_weights"]


def test_a_package_that_is_broken_is_a_problem_of_the_recipe(package: Path) -> None:
    install_package(package, "torn", {"engine.torn": "raise RuntimeError('no such device')"})
    (found,) = problems("generator.backend=torn")
    assert found.endswith("engine torn: its import fails with RuntimeError: no such device")


@pytest.mark.plugins
def test_an_unknown_name_gets_the_usual_answer() -> None:
    (found,) = problems("generator.backend=rabid")
    assert found == "generator.backend: has to be: one of embedded, vllm, stub, none"


def test_the_core_has_its_engines_without_a_plugin() -> None:
    assert [find_engine(name) for name in ("embedded", "stub", "none")] == [None] * 3
    assert all(isinstance(each, EnginePlugin) for each in known_engines().values())


@pytest.mark.plugins
@pytest.mark.parametrize(
    "first",
    [
        "offbeat.plugins.vllm.plugin",
        "offbeat.config.engine_plugin",
        "offbeat.config.generator_kinds",
        "offbeat.config.sections.generator",
    ],
)
def test_all_kinds_are_known_whatever_module_a_program_imports_first(first: str) -> None:
    program = (
        f"import {first}; from offbeat.config.schema import choices; print(*choices('generator'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["embedded", "vllm", "stub", "none"]


def test_leaving_the_engine_of_a_package_drops_its_keys(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "steps: 2\nmodel: {path: m}\ngenerator: {backend: rapid, rapid: {depth: 3}, engines: 2}\n"
    )
    config = load_recipe(recipe, ["generator.backend=embedded"]).config
    assert (config.generator.backend, config.generator.engines) == ("embedded", 2)


def test_an_engine_of_a_package_that_is_gone_is_one_problem_with_the_way_out(
    package: Path,
) -> None:
    for path in package.glob("*.dist-info"):
        (path / "entry_points.txt").write_text("")
    sys.path.append("another path")  # entry points are read once per path
    with pytest.raises(ConfigError) as refused:
        load("generator.backend=rapid", "generator.rapid.depth=3")
    assert [each.key for each in refused.value.problems] == ["generator.backend"]
    assert "install the package with the entry point engine.rapid of offbeat.plugins" in str(
        refused.value
    )


def test_an_entry_point_that_is_no_engine_is_named(tmp_path: Path) -> None:
    install_package(tmp_path, "other", {"engine.three": "PLUGIN = 3"})
    sys.path.append("a third path")
    (told,) = problems("generator.backend=three")
    named = "engine three: the entry point engine.three of the package other names 3"
    assert (
        f"{named}, not of type EnginePlugin: an object of int that has no section, server_class"
        in told
    )
