"""Commands that need no torch and no Ray work without them; the others name the package."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from offbeat.messages.missing_package import PackageMissing, missing_package

ROOT: Final = Path(__file__).resolve().parents[4]
RECIPE: Final = str(ROOT / "recipes" / "quickstart.yaml")
WITHOUT: Final = """
import sys
absent, *sys.argv[1:] = sys.argv[1:]
sys.modules.update(dict.fromkeys(absent.split(",")))  # a module that is None cannot be imported
from offbeat.launch.commands.main import main
main()
"""
TORCH_AND_RAY: Final = "ray,torch,tensordict,transformers,safetensors,cloudpickle"


def without(absent: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, absent, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    settings = ("--local", f"run_dir={folder}/run", "wandb.mode=disabled")
    done = without(TORCH_AND_RAY, folder, "dry-run", RECIPE, *settings)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.plugins
@pytest.mark.parametrize(
    "command",
    [
        ("simulate", RECIPE, "--seeds", "2"),
        ("config", "show", RECIPE),
        ("report", "{run}"),
        ("why", "{run}", "1"),
        ("replay", "{run}"),
        ("plan", "{run}"),
        ("export", "{run}", "--to", "csv"),
    ],
)
def test_what_needs_neither_torch_nor_ray_works_without_them(
    run: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = without(TORCH_AND_RAY, tmp_path, *(each.format(run=run) for each in command))
    assert done.returncode == 0, done.stderr


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("absent", "command", "package"),
    [
        ("ray", ("train", RECIPE), "ray"),
        ("ray", ("dry-run", RECIPE), "ray"),
        (TORCH_AND_RAY, ("preview", RECIPE, "--local"), "transformers"),
    ],
)
def test_a_command_names_the_package_that_it_misses(
    tmp_path: Path, absent: str, command: tuple[str, ...], package: str
) -> None:
    done = without(absent, tmp_path, *command)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"offbeat: {PackageMissing(package)}"
    assert "Traceback" not in done.stderr


@pytest.mark.plugins
def test_a_check_says_what_it_skips_without_a_package_and_checks_the_rest(tmp_path: Path) -> None:
    done = without(TORCH_AND_RAY, tmp_path, "check", RECIPE)
    assert done.returncode == 2
    skipped, fix, *others = done.stdout.splitlines()
    assert "skipped: checks of the model, all or a part: the package torch is needed" in skipped
    assert "-> Install it with transformers: pip install torch transformers." in fix
    assert any("sequence length: generator.max_model_len=512" in line for line in others)
    assert "Traceback" not in done.stderr


def test_an_import_of_the_users_own_module_is_no_missing_package() -> None:
    assert missing_package(ModuleNotFoundError("no", name="mine.rewards")) is None
    assert missing_package(ModuleNotFoundError("no", name="ray.exceptions")) is not None
