"""Recipes for other machines: the whole run on stubs, whatever this machine lacks."""

import pytest

from tests.ray.conftest import ROOT, Start
from tests.support.run_records import RunRecords


@pytest.mark.parametrize("name", ["grpo-gsm8k-1gpu", "grpo-gsm8k-1node", "smollm2-addition"])
def test_a_recipe_runs_dry_without_its_model_data_and_devices(start: Start, name: str) -> None:
    absent = ("model.path=absent", "data.path=absent", "eval.path=absent")
    recipe = ROOT / "recipes" / f"{name}.yaml"
    with start(name, recipe, *absent, "steps=2", command="dry-run") as run:
        assert run.exit_code() == 0, run.err
        RunRecords.read(run.run_dir).agree()
