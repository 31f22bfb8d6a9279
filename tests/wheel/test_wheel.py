"""The wheel, installed in an environment of its own outside the repository, trains and reports."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from offbeat import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("offbeat", "models", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a copy of the sources: a build leaves files beside them."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", dist, source], check=True)
    (made,) = dist.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("outside")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    library = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    # A .pth file of a directory that a .pth file adds is not read, so the editable offbeat stays out.
    dependencies = Path(library.stdout.strip()) / "dependencies.pth"
    dependencies.write_text(f"{sysconfig.get_path('purelib')}\n")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    return folder


def run_in(folder: Path, *args: str) -> str:
    """Standard output of ``offbeat ARGS`` in ``folder``, with no variable that names a Python."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [folder / "venv" / "bin" / "offbeat", *args],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_holds_the_starter_the_types_and_the_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in (
        *(
            "py.typed",
            "__init__.pyi",
            "interfaces.pyi",
            "launch/commands/starters/reward/recipe.yaml",
            "launch/commands/starters/reward/model/model.safetensors",
        ),
        *(
            "launch/commands/starters/agent/agent.py",
            "launch/commands/starters/agent/model/chat_template.jinja",
        ),
        *("plugins/report/web/main.js", "plugins/report/web/vendor/uPlot.iife.min.js"),
    ):
        assert f"offbeat/{name}" in names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


@pytest.mark.parametrize(("peer", "least"), [("trl", "1"), ("verifiers", "0.4")])
def test_pip_finds_recent_versions_of_a_peer_that_fit_beside_the_wheel(
    wheel: Path, peer: str, least: str
) -> None:
    resolve = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*resolve, "--report", "-", str(wheel), peer], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {
        each["metadata"]["name"]: each["metadata"] for each in json.loads(done.stdout)["install"]
    }
    assert Version(found[peer]["version"]) >= Version(least)


def test_three_commands_lead_from_the_wheel_to_a_page_of_ones_own_run(outside: Path) -> None:
    assert run_in(outside, "--version") == f"offbeat {__version__}\n"
    run_in(outside, "init", ".")
    assert "Everything is in order." in run_in(outside, "check", "recipe.yaml")
    trained = run_in(outside, "train", "recipe.yaml", "steps=20", "eval.interval=10")
    assert "\nfinished  starter" in trained
    run_in(outside, "report", "runs/starter")
    assert (outside / "runs" / "starter" / "report.html").stat().st_size > 10**5


@pytest.mark.parametrize("example", ["plugin", "engine"])
def test_a_package_of_plugins_works_next_to_the_wheel(
    outside: Path, tmp_path: Path, example: str
) -> None:
    tree = tmp_path / "tree"
    for name in (
        f"examples/{example}",
        "models/tiny-addition",
        "offbeat/launch/commands/starters/reward",
    ):
        shutil.copytree(ROOT / name, tree / name)
    package = tree / "examples" / example
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", tmp_path, package], check=True)
    (made,) = tmp_path.glob("*.whl")
    python = outside / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", made]
    subprocess.run(install, check=True)
    recipe = str(package / "recipe.yaml")
    assert "Everything is in order." in run_in(outside, "check", recipe)
    run_in(outside, "train", recipe, "steps=2", f"run_dir={tmp_path / 'run'}")
    assert "agree" in run_in(outside, "replay", str(tmp_path / "run"))
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", package, package]
    done = subprocess.run(tests, cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
