"""``offbeat check`` makes samplers and proves losses of others, with their options, as a run does."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.config.by_value import give
from offbeat.config.run import RunConfig
from offbeat.launch.checks.user_code import try_options
from offbeat.messages.finding import Finding, Level

SOURCE = """
import os

from offbeat.interfaces import ReadyFirst


class Deep(ReadyFirst):
    def __new__(cls, groups_per_step, max_staleness, depth=1):
        print("made")
        if depth < 1:
            raise ValueError(f"depth is {depth}")
        if depth > 8:
            os._exit(3)
        return ReadyFirst(groups_per_step, max_staleness)


def scaled(tokens, options):
    return -tokens.logprobs_N * tokens.advantages_N * options["scale"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_tried.py").write_text(SOURCE)
    return tmp_path


def recipe(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"steps": 1, "model": {"path": "nowhere"}, **sections})


def with_sampler(**options: object) -> RunConfig:
    return recipe(sampler={"name": "custom", "target": "my_tried:Deep", "options": options})


def with_loss(trainer: str = "torch", **options: object) -> RunConfig:
    loss = {"name": "custom", "target": "my_tried:scaled", "options": options}
    return recipe(algorithm={"loss": loss}, trainer={"backend": trainer})


def only(config: RunConfig, folder: Path) -> Finding:
    (finding,) = try_options(config, folder)
    assert finding.level is Level.ERROR
    return finding


def test_options_that_a_run_accepts_are_no_finding(folder: Path) -> None:
    assert [*try_options(recipe(), folder)] == []
    assert [*try_options(with_sampler(depth=2), folder)] == []
    assert [*try_options(with_loss(scale=2.0), folder)] == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"depth": 0}, "in __new__: ValueError: depth is 0"),
        ({"dept": 2}, "unexpected keyword argument 'dept'"),
        ({"max_staleness": 2}, "sampler.options has max_staleness, which the run passes already"),
        ({"depth": 9}, "the process that tried it ended with code 3"),
    ],
)
def test_an_option_that_a_sampler_refuses_is_an_error_with_key_value_and_fix(
    folder: Path, options: dict[str, int], problem: str
) -> None:
    ((key, value),) = options.items()
    finding = only(with_sampler(**options), folder)
    named = f"sampler.target=my_tried:Deep with sampler.options.{key}={value}: "
    assert (finding.subject, finding.message.startswith(named)) == ("sampler", True)
    assert problem in finding.message
    assert finding.fix.endswith(f", or change sampler.options.{key}.")


def test_an_option_that_a_loss_cannot_use_is_an_error_with_key_value_and_fix(folder: Path) -> None:
    finding = only(with_loss(scale="much"), folder)
    named = "algorithm.loss.target=my_tried:scaled with algorithm.loss.options.scale='much': "
    assert (finding.subject, finding.message.startswith(named)) == ("algorithm.loss", True)
    assert "TypeError" in finding.message
    assert finding.fix == "Repair the function, or change algorithm.loss.options.scale."
    without = only(with_loss(), folder)
    assert "KeyError: 'scale'" in without.message
    assert without.fix == "Repair the function."


def test_a_secret_among_the_options_is_not_shown(folder: Path) -> None:
    finding = only(with_sampler(api_key="hidden-value"), folder)
    assert "sampler.options.api_key='REDACTED'" in finding.message
    assert "hidden-value" not in str(finding)


def test_code_that_has_an_error_already_or_that_no_run_calls_is_not_tried(folder: Path) -> None:
    assert [*try_options(with_sampler(depth=0), folder, {"sampler"})] == []
    assert [*try_options(with_loss(), folder, {"algorithm.loss"})] == []
    assert [*try_options(with_loss("stub"), folder)] == []


def test_code_that_was_given_by_value_is_not_tried_in_another_process(folder: Path) -> None:
    loss = {"name": "custom", "target": give(lambda tokens, options: None)}
    assert [*try_options(recipe(algorithm={"loss": loss}), folder)] == []


def test_code_that_is_not_ready_in_time_is_a_warning(folder: Path) -> None:
    (finding,) = try_options(with_sampler(depth=2), folder, within_s=0.01)
    assert finding.level is Level.WARNING
    assert "it was not ready after 0.01 s, and a run waits for it" in finding.message
