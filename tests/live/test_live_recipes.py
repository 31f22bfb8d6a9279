"""Every recipe through ``offbeat check`` and ``offbeat dry-run``, on a machine that lacks most of it."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.support.run_records import RunRecords
from tests.support.starting import ROOT
from tests.support.warm_commands import warm_commands

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LACKED = {
    "environment",
    "gpus",
    "model",
    "prompts",
    "reasoning-gym",
    "teacher",
    "verifiers",
    "vllm",
}
"""Subjects of errors about packages, devices and files, which differ from machine to machine."""
OFFLINE: Mapping[str, str] = MappingProxyType({"HF_HUB_OFFLINE": "1", "COLUMNS": "200"})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_checked_and_lacks_no_more_than_packages_devices_and_files(
    recipe: Path,
) -> None:
    done = warm_commands().run(ROOT, "check", recipe, environment=OFFLINE)
    last = done.stdout.rstrip().splitlines()[-1]
    assert not done.stderr, done.stderr
    errors = re.match(r"\d+ errors? \((.+?)\)", last)
    assert done.returncode == (2 if errors else 0), done.stdout
    assert errors is None or set(errors[1].split(", ")) <= LACKED, done.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_dry_without_what_this_machine_lacks(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("dry-run", recipe, "--local", "steps=2", f"run_dir={run}")
    done = warm_commands().run(ROOT, *arguments, environment=OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    RunRecords.read(run).agree()
