"""The package in ``examples/plugin``, installed beside this one: each part of it at work, by name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package by pip into a folder; return the folder."""
    pytest.importorskip("setuptools")  # builds it, without a download
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", "--target", folder, source], check=True)
    return folder


def offbeat(installed: Path, *arguments: str | Path) -> str:
    """Run a command in the directory of the example; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *map(str, arguments)],
        cwd=PACKAGE,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_tests_prove_each_part(installed: Path) -> None:
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_lab.py"]
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(tests, cwd=PACKAGE, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "5 passed" in done.stdout) == (0, True), done.stdout


def test_a_recipe_of_its_parts_is_checked_explained_and_simulated(installed: Path) -> None:
    assert "Everything is in order." in offbeat(installed, "check", "recipe.yaml")
    assert "Metric of the lines." in offbeat(installed, "config", "explain", "plugins.lines")
    shown = offbeat(installed, "simulate", "recipe.yaml", "--seeds", "5")
    assert "  offbeat_lab.sampler:PromptOrder: each episode draws a policy of this package" in shown
    assert "  nearly: made-up tokens and rewards" in shown
    assert "  lines: metrics are kept in memory" in shown
    assert "violations in 0 episodes" in shown


def test_its_parts_train_are_resumed_and_reported(installed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    offbeat(installed, "train", "recipe.yaml", "steps=2", f"run_dir={run}")
    offbeat(installed, "train", "--resume", run, "steps=4")
    lines = offbeat(installed, "lines", run).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"]
    offbeat(installed, "report", run)
    assert "agree" in offbeat(installed, "replay", run)
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    assert recipe["sampler"]["target"] == "offbeat_lab.sampler:PromptOrder"
    assert recipe["environment"]["name"] == "nearly"
    inputs = (run / "inputs.json").read_text()
    assert all(part in inputs for part in ("sampler", "loss", "advantage"))


def test_a_dry_run_has_its_tracker(installed: Path, tmp_path: Path) -> None:
    offbeat(installed, "dry-run", "recipe.yaml", f"run_dir={tmp_path / 'dry'}")
    assert (tmp_path / "dry" / "lines.txt").read_text().count("\n") == 10


def test_without_the_package_its_names_are_unknown(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "check", PACKAGE / "recipe.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    for problem in ("prompt_order", "bounded", "nearly", "tracker lines: there is none"):
        assert problem in done.stderr, done.stderr
