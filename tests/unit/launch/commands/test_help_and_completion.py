"""The groups of ``offbeat --help``, and how a shell completes commands, recipes and runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.doors import find_plugins
from offbeat.launch.commands.arguments import GROUPS, complete_recipe, complete_run
from offbeat.launch.commands.main import app
from tests.support.installed_package import install_package


def listed() -> dict[str, list[str]]:
    """The commands of ``offbeat --help`` by heading."""
    found = dict[str, list[str]]()
    heading = ""
    for line in CliRunner().invoke(app, ["--help"]).output.splitlines():
        if line and not line.startswith(" "):
            heading = line.rstrip(":")
        elif heading and (name := re.match(r"  ([\w-]+)  ", line)):
            found.setdefault(heading, []).append(name[1])
    return found


@pytest.mark.plugins
def test_each_command_has_a_heading_and_those_of_plug_ins_are_next_to_the_others() -> None:
    groups = listed()
    shown = [*groups]
    assert [heading for heading in shown if heading in GROUPS] == [*GROUPS]
    assert "Other commands" not in groups
    assert {"train", "init", "config"} <= {*groups["Start a run"]}
    assert {"why", "report", "watch", "verify-weights"} <= {*groups["Look at a run"]}
    assert {"control", "submit"} <= {*groups["Operate"]}
    assert {"simulate", "plan", "sweep"} <= {*groups["Plan and test"]}
    assert find_plugins("command")


@pytest.mark.plugins
def test_a_command_of_another_package_is_listed_with_its_package_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install_package(tmp_path, "shows", {"command.shown": "raise SystemExit(1)"})
    assert listed()["Other commands"] == ["shown"]
    assert "Of package shows." in CliRunner().invoke(app, ["--help"]).output


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with recipes and runs, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("recipes/quick.yaml", "recipes/math.yaml", "runs/a/config.yaml", "mine.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "elsewhere" / "b").mkdir(parents=True)
    (tmp_path / "elsewhere" / "b" / "config.yaml").touch()
    return tmp_path


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("", ["mine.yaml"]),
        ("rec", ["recipes/math.yaml", "recipes/quick.yaml"]),
        ("recipes/q", ["recipes/quick.yaml"]),
        ("qui", ["recipes/quick.yaml"]),
        ("[", []),
        ("nothing", []),
    ],
)
def test_recipes_are_completed_here_and_in_recipes(typed: str, completed: list[str]) -> None:
    assert complete_recipe(typed) == completed


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [("", ["runs/a"]), ("ru", ["runs/a"]), ("a", ["runs/a"]), ("elsewhere/", ["elsewhere/b"])],
)
def test_only_directories_with_a_recipe_are_completed_as_runs(
    typed: str, completed: list[str]
) -> None:
    assert complete_run(typed) == completed


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("offbeat contr", ["control"]),
        ("offbeat train rec", ["recipes/math.yaml", "recipes/quick.yaml"]),
        ("offbeat why ", ["runs/a"]),
        ("offbeat train --resume ru", ["runs/a"]),
    ],
)
def test_bash_gets_commands_recipes_and_runs(work: Path, words: str, completed: list[str]) -> None:
    environ = {
        **os.environ,
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_OFFBEAT_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from offbeat.launch.commands.main import main; main()"],
        cwd=work,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (completed, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str) -> None:
    environ = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "--show-completion", shell],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "_OFFBEAT_COMPLETE=complete_" in done.stdout
