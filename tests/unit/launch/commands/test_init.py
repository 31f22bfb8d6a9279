"""``offbeat init`` and the versions of ``offbeat check``: first contact, and a bug report."""

import contextlib
import platform
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.config.loader import load_recipe
from offbeat.launch.checks.user_code import check_loss, check_targets
from offbeat.launch.commands.main import app
from offbeat.messages.finding import Level


def offbeat(*args: str) -> Result:
    return CliRunner().invoke(app, args)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "contact"
    result = offbeat("init", str(folder))
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.plugins
def test_a_starter_is_a_recipe_whose_every_path_is_inside_it(starter: Path) -> None:
    config = load_recipe(starter / "recipe.yaml").config
    paths = [config.model.path, config.data.path, config.eval.path]
    assert all(path and Path(path).is_relative_to(starter) for path in paths)
    assert (starter / ".gitignore").read_text().startswith("/runs/")


def test_the_reward_of_a_starter_passes_its_test(starter: Path) -> None:
    subprocess.run([sys.executable, "test_rewards.py"], cwd=starter, check=True)


@pytest.mark.plugins
def test_a_starter_of_an_agent_is_a_recipe_whose_every_path_and_target_is_inside_it(
    tmp_path: Path,
) -> None:
    assert offbeat("init", "--agent", str(tmp_path)).exit_code == 0
    config = load_recipe(tmp_path / "recipe.yaml").config
    paths = [config.model.path, config.data.path, config.eval.path]
    assert all(path and Path(path).is_relative_to(tmp_path) for path in paths)
    findings = check_targets(config, tmp_path)
    absent = find_spec("openai") is None
    assert [each.level for each in findings] == ([Level.ERROR] if absent else [Level.OK])


@pytest.mark.parametrize(
    ("options", "run"), [((), "runs/starter"), (("--agent",), "runs/agent-starter")]
)
def test_a_starter_says_what_to_type_next(
    tmp_path: Path, options: tuple[str, ...], run: str
) -> None:
    printed = offbeat("init", *options, str(tmp_path / "mine")).output
    commands = [line.split()[:3] for line in printed.splitlines() if line.startswith("  ")]
    if options and find_spec("openai") is None:
        assert commands.pop(1) == ["pip", "install", "'offbeat[agents]'"]
    assert commands[0][0] == "cd"
    assert [each[:2] for each in commands[1:]] == [
        ["offbeat", name] for name in ("check", "train", "report")
    ]
    assert commands[-1][2] == run


@pytest.mark.plugins
def test_a_loss_comes_with_its_test_and_with_a_recipe_where_there_is_none(tmp_path: Path) -> None:
    printed = offbeat("init", "--loss", str(tmp_path)).output
    assert "offbeat train recipe.yaml algorithm.loss.target=losses:loss" in printed
    config = load_recipe(tmp_path / "recipe.yaml", ["algorithm.loss.target=losses:loss"]).config
    (finding,) = check_loss(config, tmp_path)
    assert finding.level is Level.OK
    subprocess.run([sys.executable, "test_losses.py"], cwd=tmp_path, check=True)


def test_a_recipe_that_is_there_gets_the_loss_alone(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    assert offbeat("init", "--loss", str(tmp_path)).exit_code == 0
    assert {each.name for each in tmp_path.iterdir()} == {
        "recipe.yaml", "losses.py", "test_losses.py"
    }  # fmt: skip
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    assert "give one of them" in offbeat("init", "--loss", "--agent", str(tmp_path)).stderr


def test_no_file_is_replaced_and_none_is_written_beside_it(tmp_path: Path) -> None:
    mine = tmp_path / "rewards.py"
    mine.write_text("mine")
    result = offbeat("init", str(tmp_path))
    assert result.exit_code == 2
    assert "rewards.py, and nothing is overwritten" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
    assert mine.read_text() == "mine"


def test_what_a_starter_says_to_type_is_for_a_shell(tmp_path: Path) -> None:
    printed = offbeat("init", str(tmp_path / "my task")).output
    assert f"  cd '{tmp_path / 'my task'}'\n" in printed


def test_a_link_to_nothing_is_a_file_that_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").symlink_to(tmp_path / "nothing")
    result = offbeat("init", str(tmp_path))
    assert result.exit_code == 2
    assert "already has rewards.py" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]


def test_a_name_that_is_too_long_is_refused_in_one_line(tmp_path: Path) -> None:
    result = offbeat("init", str(tmp_path / ("x" * 300)))
    assert result.exit_code == 2
    assert "cannot be written: File name too long" in result.stderr


def test_a_directory_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = offbeat("init", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert "cannot be written: Not a directory" in result.stderr


def test_check_without_a_recipe_prints_the_versions_of_a_bug_report() -> None:
    lines = offbeat("check").stdout.splitlines()
    found = dict(line.split(maxsplit=1) for line in lines[1:])
    assert lines[0] == "versions, for a bug report"
    assert found["offbeat"] == version("offbeat")
    assert found["python"].startswith(platform.python_version())
    assert found["ray"] == version("ray")
    assert {"pytest", "ruff"} & set(found) == set(), "no development tool"


def test_an_empty_directory_name_is_not_the_working_directory(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        result = offbeat("init", "")
    assert result.exit_code == 2
    assert "leave it out: offbeat init" in result.stderr
    assert not list(tmp_path.iterdir())
