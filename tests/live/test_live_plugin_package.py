"""The package in ``examples/plugin``, installed beside this one: each part of it at work, by name."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.installed_package import InstalledExample

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> InstalledExample:
    return InstalledExample.install(PACKAGE, tmp_path_factory.mktemp("site"))


def test_its_own_tests_prove_each_part(lab: InstalledExample) -> None:
    done = lab.test()
    assert (done.returncode, "5 passed" in done.stdout) == (0, True), done.stdout


def test_a_recipe_of_its_parts_is_checked_explained_and_simulated(lab: InstalledExample) -> None:
    assert "Everything is in order." in lab.offbeat("check", "recipe.yaml")
    assert "Metric of the lines." in lab.offbeat("config", "explain", "plugins.lines")
    shown = lab.offbeat("simulate", "recipe.yaml", "--seeds", "5")
    assert "  offbeat_lab.sampler:PromptOrder: each episode draws a policy of this package" in shown
    assert "  nearly: made-up tokens and rewards" in shown
    assert "  lines: metrics are kept in memory" in shown
    assert "violations in 0 episodes" in shown


def test_an_option_that_its_sampler_lacks_is_one_finding_of_check(lab: InstalledExample) -> None:
    done = lab.command("check", "recipe.yaml", "sampler.options.dept=2")
    assert done.returncode == 2
    assert done.stdout.count("got an unexpected keyword argument 'dept'") == 1, done.stdout
    assert "1 error (sampler)" in done.stdout


def test_its_parts_train_are_resumed_and_reported(lab: InstalledExample, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lab.offbeat("train", "recipe.yaml", "steps=2", f"run_dir={run}")
    lab.offbeat("train", "--resume", run, "steps=4")
    lines = lab.offbeat("lines", run).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4"]
    lab.offbeat("report", run)
    assert "agree" in lab.offbeat("replay", run)
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    assert recipe["sampler"]["target"] == "offbeat_lab.sampler:PromptOrder"
    assert recipe["environment"]["name"] == "nearly"
    inputs = (run / "inputs.json").read_text()
    assert all(part in inputs for part in ("sampler", "loss", "advantage"))


def test_a_dry_run_has_its_tracker(lab: InstalledExample, tmp_path: Path) -> None:
    lab.offbeat("dry-run", "recipe.yaml", f"run_dir={tmp_path / 'dry'}")
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
    for problem in (
        "prompt_order",
        "bounded",
        "nearly",
        "tracker lines: there is no plug-in with this name",
    ):
        assert problem in done.stderr, done.stderr
