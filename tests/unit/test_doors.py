"""Plug-ins are found by kind and name: of this package, and of other packages by entry points."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import typer

from offbeat.doors import (
    Kind,
    PluginUnusable,
    find_installed_version,
    find_module,
    find_only,
    find_plugin,
    find_plugins,
    find_problems,
    import_object,
    is_installed,
    names_of_packages,
)
from offbeat.launch.commands.main import app
from offbeat.telemetry.tracker import Tracker
from tests.support.installed_package import TRACKER, install_package, module_of

Install = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.syspath_prepend(tmp_path)
    return partial(install_package, tmp_path)


def test_plugins_of_this_package_are_found_by_kind_and_name() -> None:
    trackers = find_plugins("tracker")
    assert [*trackers] == ["wandb", "tensorboard"]
    assert all(isinstance(each, Tracker) for each in trackers.values())
    assert find_plugin("tracker", "wandb") is trackers["wandb"]


def test_the_plugin_of_a_kind_that_has_one_is_found_without_its_name() -> None:
    assert find_only("release_form") is find_plugin("release_form", "delta")


def test_an_unknown_name_lists_the_known_ones_and_how_a_package_brings_one() -> None:
    with pytest.raises(PluginUnusable) as refused:
        find_plugin("tracker", "leaderboard")
    assert str(refused.value) == (
        "tracker leaderboard: there is no plug-in with this name. Use one of wandb, tensorboard, or install "
        "the package with the entry point tracker.leaderboard of offbeat.plugins"
    )


def test_code_of_another_package_is_imported_only_when_it_is_named(install: Install) -> None:
    install("boards", {"tracker.leaderboard": TRACKER, "tracker.other": TRACKER})
    assert "leaderboard" not in find_plugins("tracker")
    assert find_problems() == []
    assert module_of("boards", "tracker.leaderboard") not in sys.modules
    assert isinstance(find_plugin("tracker", "leaderboard"), Tracker)
    assert module_of("boards", "tracker.other") not in sys.modules


def test_a_plugin_whose_import_fails_is_named_with_its_error(install: Install) -> None:
    install(
        "torn",
        {"tracker.torn": "raise RuntimeError('no such board')", "tracker.good": TRACKER},
    )
    with pytest.raises(PluginUnusable, match="RuntimeError: no such board"):
        find_plugin("tracker", "torn")
    assert isinstance(find_plugin("tracker", "good"), Tracker)


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install("one", {"tracker.board": "PLUGIN = 1"})
    install("two", {"tracker.board": "PLUGIN = 2"})
    with pytest.raises(PluginUnusable, match="one and two each provide one"):
        find_plugin("tracker", "board")
    assert [str(each) for each in find_problems()] == [
        "tracker board: one and two each provide one. Uninstall all but one, or ask for another name"
    ]


def test_a_package_that_repeats_a_name_of_ours_is_reported_and_not_used(install: Install) -> None:
    install("copy", {"tracker.wandb": "PLUGIN = 'not ours'"})
    assert isinstance(find_plugin("tracker", "wandb"), Tracker)
    assert [each.problem for each in find_problems()] == ["copy and offbeat each provide one"]


def test_names_of_packages_are_listed_from_their_metadata(install: Install) -> None:
    broken = "raise RuntimeError"
    install("one", {"tracker.board": broken, "sampler.fresh": broken, "tracker.wandb": broken})
    install("two", {"tracker.board": broken, "tracker.list": broken})
    assert names_of_packages("tracker") == {"board": "one and two", "list": "two"}
    assert names_of_packages("sampler") == {"fresh": "one"}


WITHOUT_SECTION = (
    "from offbeat.interfaces import Tracker\nclass Board(Tracker):\n    make_sink = 1\n"
)
PUZZLES = """
from offbeat.interfaces import PluginOfEnvironments


class Puzzles(PluginOfEnvironments):
    make_environment = None


PLUGIN = Puzzles()
"""


@pytest.mark.parametrize(
    ("kind", "source", "problem", "fix"),
    [
        (
            "tracker",
            "class Board:\n    section = 1\nPLUGIN = Board()",
            "not of type Tracker: an object of Board that has no make_sink",
            "Let it name an object of a class that derives from Tracker",
        ),
        (
            "tracker",
            f"{WITHOUT_SECTION}PLUGIN = Board",
            "the class Board, not an object of it",
            "Let it name an object: PLUGIN = Board()",
        ),
        (
            "tracker",
            f"{WITHOUT_SECTION}PLUGIN = Board()",
            "an object of Board that has no section",
            "Give it section",
        ),
        (
            "tracker",
            f"{WITHOUT_SECTION}PLUGIN = Board()\nPLUGIN.section = dict",
            "an object of Board whose section is <class 'dict'>",
            "Set section to a subclass of Config",
        ),
        (
            "environment",
            "PLUGIN = 3",
            "PluginOfAgents: an object of int that has no traits, make_environment",
            "derives from PluginOfEnvironments or PluginOfAgents",
        ),
        ("environment", PUZZLES, "an object of Puzzles that has no traits", "Give it traits"),
        (
            "environment",
            f"{PUZZLES}PLUGIN.traits = 'puzzles'",
            "an object of Puzzles whose traits is 'puzzles'",
            "Set traits to an object of EnvironmentTraits",
        ),
        (
            "command",
            "def PLUGIN(): ...",
            "not of type Typer: an object of function",
            "derives from Typer",
        ),
    ],
)
def test_an_entry_point_that_names_no_plugin_of_its_kind_is_refused_with_what_it_lacks(
    install: Install, tmp_path: Path, kind: Kind, source: str, problem: str, fix: str
) -> None:
    package = tmp_path.name  # a module of the same name is imported once
    install(package, {f"{kind}.odd": source})
    with pytest.raises(PluginUnusable) as refused:
        find_plugin(kind, "odd")
    assert refused.value.subject == f"{kind} odd"
    named = f"the entry point {kind}.odd of the package {package} names"
    assert refused.value.problem.startswith(named)
    assert problem in refused.value.problem
    assert fix in refused.value.fix


COMMAND = """
import typer

PLUGIN = typer.Typer()


@PLUGIN.command()
def board(name: str) -> None:
    typer.echo(f"the board of {name}")
"""


def test_a_command_of_another_package_is_one_of_offbeat(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("boards", {"command.board": COMMAND, "command.torn": "raise RuntimeError('no board')"})
    assert (run_offbeat("board", "words"), capsys.readouterr().out) == (0, "the board of words\n")
    assert run_offbeat("torn") == 2
    shown = capsys.readouterr().err
    assert "command torn: its import fails with RuntimeError: no board" in shown
    assert run_offbeat("repotr") == 2
    assert "No such command 'repotr'. Did you mean 'report'" in capsys.readouterr().err


def test_a_command_without_any_is_refused(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("empty", {"command.empty": "import typer\nPLUGIN = typer.Typer()"})
    assert run_offbeat("empty") == 2
    told = "command empty: its entry point names a Typer that has no command. Give it one"
    assert told in capsys.readouterr().err


def run_offbeat(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        typer.main.get_command(app)([*arguments], prog_name="offbeat")
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    "first",
    [
        "offbeat.doors",
        "offbeat.config.environment_traits",
        "offbeat.environments.environment_plugin",
        "offbeat.telemetry.tracker",
        "offbeat.trainers.trainer_plugin",
        "offbeat.plugins.encoder_ranks.plugin",
        "offbeat.plugins.megatron.plugin",
        "offbeat.launch.commands.main",
    ],
)
def test_every_plugin_can_be_imported_whatever_module_a_program_imports_first(first: str) -> None:
    program = f"import {first}\nfrom offbeat.doors import find_problems\nprint(find_problems())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_folder_of_a_plugin_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_offbeat("planning") == 2
    assert "No such command 'planning'" in capsys.readouterr().err


def test_an_object_is_imported_by_the_name_of_its_module_and_its_own() -> None:
    assert import_object("offbeat.doors") is sys.modules["offbeat.doors"]
    assert import_object("offbeat.doors:find_plugin") is find_plugin
    with pytest.raises(AttributeError, match="nothing"):
        import_object("offbeat.doors:nothing")


def test_the_file_of_a_module_is_found_without_importing_it_or_its_package(tmp_path: Path) -> None:
    package = tmp_path / "unloaded_package"
    package.mkdir()
    for name in ("__init__", "inner"):
        (package / f"{name}.py").write_text("raise RuntimeError")
    assert find_module("unloaded_package.inner", tmp_path) == package / "inner.py"
    assert find_module("unloaded_package.absent", tmp_path) is None
    assert find_module("unloaded_package.inner.below", tmp_path) is None


def test_what_is_installed_is_known_without_importing_it() -> None:
    assert is_installed("typer") and not is_installed("no_package_of_this_name")
    assert (
        find_installed_version("typer")
        and find_installed_version("no-package-of-this-name") is None
    )
