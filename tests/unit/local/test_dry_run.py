"""A dry run in one process."""

import subprocess
import sys
from pathlib import Path

import pytest

DRY_RUN = """
import sys

from offbeat.launch.launch import run_recipe

recipe, run_dir = sys.argv[1:]
overrides = ["runtime.backend=local", "steps=2", "wandb.mode=disabled"]
code = run_recipe(recipe, overrides, run_dir=run_dir, dry_run=True)
print(code, *{"ray", "tensordict", "torch", "transformers"} & {*sys.modules})
"""


@pytest.mark.plugins
def test_a_run_of_stubs_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
    finished = subprocess.run(
        [sys.executable, "-c", DRY_RUN, str(recipe), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert finished.stdout.splitlines()[-1] == "0"
