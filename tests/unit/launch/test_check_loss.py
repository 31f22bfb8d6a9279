"""Checks of a loss and an advantage of the user's own: they are imported in a child process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.config.by_value import give
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.launch.checks.user_code import check_advantage, check_loss
from offbeat.messages.finding import Finding, Level

SOURCE = """
import sys
assert 'pytest' not in sys.modules
def loss(tokens, options): ...
def with_default(tokens, options=None, more=1): ...
def alone(tokens): ...
def greedy(tokens, options, beta): ...
async def late(tokens, options): ...
clip = 0.2
"""


def found(target: str, folder: Path) -> Finding:
    loss = {"name": "custom", "target": target, "options": {"beta": 1}}
    config = RunConfig.model_validate(
        {"steps": 1, "model": {"path": "nowhere"}, "algorithm": {"loss": loss}}
    )
    (finding,) = check_loss(config, folder)
    return finding


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_checked_loss.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize("name", ["loss", "with_default"])
def test_a_function_of_tokens_and_options_is_found_in_a_child_process(
    folder: Path, name: str
) -> None:
    finding = found(f"my_checked_loss:{name}", folder)
    assert (finding.level, finding.message) == (Level.OK, "module my_checked_loss is found")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("alone", "takes 1 positional argument; a loss gets tokens and options"),
        ("greedy", "needs 'beta': read options['beta']; a loss gets tokens and options"),
        ("late", "is async: write def late"),
        ("clip", "has no 'clip' that can be called, but a float"),
        ("los", "has no 'los'; did you mean 'loss'?"),
    ],
)
def test_any_other_function_is_an_error_with_its_line_or_name(
    folder: Path, name: str, problem: str
) -> None:
    finding = found(f"my_checked_loss:{name}", folder)
    assert finding.level is Level.ERROR
    assert finding.message.startswith(f"algorithm.loss.target=my_checked_loss:{name}: ")
    assert problem in finding.message


def test_a_module_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert "no module my_absent_loss from" in found("my_absent_loss:loss", tmp_path).message


class Loss:
    def __call__(self, tokens: object, options: object) -> object:
        return tokens


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Loss(), ""),
        (lambda tokens, options: tokens, ""),
        (lambda tokens: tokens, "takes 1 positional argument; a loss gets tokens and options"),
        (Loss, "Loss is a class: calling it returns no tensor"),
    ],
)
def test_a_loss_by_value_is_looked_at_likewise(value: Callable[..., Any], problem: str) -> None:
    finding = found(give(value), Path.cwd())
    assert finding.level is (Level.ERROR if problem else Level.OK)
    assert problem in finding.message


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("my_checked_loss:alone", ""),
        (
            "my_checked_loss:loss",
            "needs 'options': give it a default; an advantage gets the rewards",
        ),
        ("my_checked_loss:late", "is async: write def late"),
        (give(lambda rewards: rewards), ""),
        (
            give(lambda: 1.0),
            "takes 0 positional arguments; an advantage gets the rewards of a group",
        ),
    ],
)
def test_an_advantage_is_a_function_of_rewards(folder: Path, target: str, problem: str) -> None:
    config = RunConfig.model_validate(
        {"steps": 1, "model": {"path": "nowhere"}, "algorithm": {"advantage": target}}
    )
    (finding,) = check_advantage(config, folder)
    assert finding.level is (Level.ERROR if problem else Level.OK)
    assert problem in finding.message
    assert not problem or finding.message.startswith("algorithm.advantage")
    assert "algorithm.advantage.target" not in finding.message


def test_those_of_the_package_are_not_looked_for(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"steps": 1, "model": {"path": "nowhere"}})
    assert not [*check_loss(config, tmp_path), *check_advantage(config, tmp_path)]


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (3, "argument loss: it has the type int"),
        ("gspo", "argument loss: algorithm.loss.target=gspo does not name a function"),
        ({"name": "gspo", "target": "a:b"}, "argument loss: algorithm.loss.target = 'a:b'"),
    ],
)
def test_an_argument_that_is_no_loss_is_named(loss: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        offbeat.train(
            model="nowhere", loss=loss, steps=1, run_dir=tmp_path / "run", dry_run=True, quiet=True
        )
    assert problem in str(caught.value)
