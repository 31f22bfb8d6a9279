"""An environment of another package, from its name in a recipe to its rewards."""

import asyncio
import pickle
from pathlib import Path

import pytest

from offbeat.config.explain import explain
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.environments.environment_plugin import find_environment
from offbeat.environments.factory import make_environment, make_evaluation_sets, make_prompts
from offbeat.environments.protocol import SingleTurn
from offbeat.plugins.agents.factory import make_agent
from tests.support.environment_fakes import CharTokenizer, result, task
from tests.support.installed_package import install_package

PUZZLES = """
from offbeat.config.problems import Clash
from offbeat.config.environment_traits import EnvironmentTraits
from offbeat.environments.environment_plugin import PluginOfEnvironments
from offbeat.environments.prompts import ArithmeticPrompts
from offbeat.environments.protocol import SingleTurn
from offbeat.messages.finding import ok


class Puzzle(SingleTurn):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, prompt):
        return tuple(self.tokenizer.encode("1+1="))

    async def score(self, task, result):
        return [float(index) for index, _ in enumerate(result.finish_reasons, 1)]


class Puzzles(PluginOfEnvironments):
    traits = EnvironmentTraits("puzzles.", makes_prompts=True)

    def make_prompts(self, config, began_with, working_dir):
        return ArithmeticPrompts(0, 9, shuffle=config.data.shuffle, seed=config.seed, epochs=None)

    def make_held_out_prompts(self, config):
        return ArithmeticPrompts(9, 12, shuffle=False, seed=config.seed, epochs=1)

    def make_environment(self, section, tokenizer, working_dir):
        return Puzzle(tokenizer)

    def find_clashes(self, section):
        if section.max_turns > 1:
            yield Clash(("environment.max_turns",), "a puzzle has one turn", "Leave it out.")

    def check(self, config):
        yield ok("puzzles", f"seed {config.seed}")


PLUGIN = Puzzles()
"""

AGENTS = """
from offbeat.config.environment_traits import EnvironmentTraits
from offbeat.environments.environment_plugin import PluginOfAgents


class Players(PluginOfAgents):
    traits = EnvironmentTraits("players.", is_agent=True)

    def make_agent(self, section, working_dir, model_path):
        return f"players of {model_path}"


PLUGIN = Players()
"""

RECIPE = ("steps=2", "model.path=tiny", "wandb.mode=disabled")


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    torn = "raise RuntimeError('no puzzles today')"
    sources = {"puzzles": PUZZLES, "players": AGENTS, "torn": torn}
    install_package(tmp_path, "games", {f"environment.{n}": each for n, each in sources.items()})


def recipe(*overrides: str) -> RunConfig:
    return load_recipe(None, [*RECIPE, *overrides]).config


def test_an_environment_of_another_package_makes_prompts_and_scores(tmp_path: Path) -> None:
    config = recipe("environment.name=puzzles")
    prompt = make_prompts(config).prompt(0)
    assert prompt is not None
    environment = make_environment(config.environment, CharTokenizer(), tmp_path)
    assert isinstance(environment, SingleTurn)
    assert environment.encode(prompt)
    assert [*asyncio.run(environment.score(task(), result("request", ["2"])))] == [1.0]


def test_evaluations_without_a_file_score_its_held_out_prompts() -> None:
    (held_out,) = make_evaluation_sets(
        recipe("environment.name=puzzles", "eval.interval=1")
    ).values()
    prompt = held_out.prompt(0)
    assert prompt is not None
    assert prompt.data == {"prompt": "9+9=", "answer": 18}


def test_an_agent_of_another_package_is_made_by_it(tmp_path: Path) -> None:
    section = recipe("environment.name=players").environment
    assert section.is_agent
    agent: object = make_agent(section, tmp_path, model_path="tiny")
    assert agent == "players of tiny"


def test_a_recipe_that_names_it_is_written_and_read_like_any_other() -> None:
    config = recipe("environment.name=puzzles")
    assert RunConfig.model_validate(config.model_dump()) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - as Ray hands it to an actor


def test_its_findings_and_its_rules_are_part_of_the_check() -> None:
    config = recipe("environment.name=puzzles", "seed=7")
    plugin = find_environment(config.environment.name)
    assert plugin is not None
    assert "puzzles: seed 7" in "".join(map(str, plugin.check(config)))
    with pytest.raises(ConfigError, match="a puzzle has one turn"):
        recipe("environment.name=puzzles", "environment.max_turns=2")
    with pytest.raises(ConfigError, match=r"environment\.name=puzzles makes its own prompts"):
        recipe("environment.name=puzzles", "data.path=rows.jsonl")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="has to be: one of arithmetic, digits, gsm8k, function"):
        recipe("environment.name=puzzle")
    assert "gsm8k: questions with a number as answer" in explain("environment.name")


def test_a_package_whose_import_fails_is_named_with_its_error() -> None:
    with pytest.raises(ConfigError, match="RuntimeError: no puzzles today"):
        recipe("environment.name=torn")
