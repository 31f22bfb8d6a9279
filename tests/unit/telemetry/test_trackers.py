"""A tracker of another package, from its section in a recipe to its file."""

from pathlib import Path

import pytest

from offbeat.config.explain import NoSuchKey, explain
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.launch.checks.software import check_trackers
from offbeat.launch.dry_run import dry
from offbeat.telemetry.hub import run_telemetry
from offbeat.telemetry.tracker import TrackedRun
from tests.support.installed_package import TRACKER, install_package

RECIPE = ("steps=2", "model.path=.", "wandb.mode=disabled")


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with a tracker; return the path of its file."""
    monkeypatch.syspath_prepend(tmp_path)
    install_package(tmp_path, "boards", {"tracker.board": TRACKER})
    return tmp_path / "board.txt"


@pytest.mark.plugins
def test_a_tracker_of_another_package_gets_each_step(board: Path) -> None:
    config = load_recipe(None, [*RECIPE, f"plugins.board.path={board}"]).config
    telemetry = run_telemetry(config, TrackedRun("id", "run", board.parent, {}))
    telemetry.start()
    telemetry.emit(1, 1, {"train/reward": 0.5})
    telemetry.close(10.0)
    assert board.read_text() == "1 ['train/reward']\n"


@pytest.mark.plugins
def test_a_tracker_is_checked_and_changes_its_section_for_a_dry_run(board: Path) -> None:
    config = load_recipe(None, [*RECIPE, f"plugins.board.path={board}"]).config
    assert f"board: {board}" in "\n".join(map(str, check_trackers(config, {})))
    assert dry(config).plugins["board"] == {"path": str(board), "dry": True}


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("plugins.nowhere.path=x", "there is no plug-in with this name"),
        ("plugins.board.paht=x", "plugins.board.path: Field required"),
        ("plugins.wandb.mode=offline", "wandb has a separate section"),
    ],
)
@pytest.mark.usefixtures("board")
def test_a_section_that_its_plugin_refuses_is_a_problem_of_the_recipe(
    override: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_recipe(None, [*RECIPE, override])


@pytest.mark.usefixtures("board")
def test_the_keys_of_a_plugin_are_explained() -> None:
    assert explain("plugins.board").startswith("plugins.board: A board of somebody else.")
    assert "text; required\n    File of the board." in explain("plugins.board.path")
    with pytest.raises(NoSuchKey, match="board has the keys path, dry"):
        explain("plugins.board.paht")
    with pytest.raises(NoSuchKey, match="there is no plug-in with this name"):
        explain("plugins.nowhere")
