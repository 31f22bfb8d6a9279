"""Recipes for other machines: the whole run on stubs, whatever this machine lacks."""

from collections.abc import Callable

import pytest

from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start


@pytest.mark.parametrize("name", ["grpo-gsm8k-1gpu", "grpo-gsm8k-1node", "smollm2-addition"])
def test_a_recipe_runs_dry_without_its_model_data_and_devices(start: Start, name: str) -> None:
    absent = ("model.path=absent", "data.path=absent", "eval.path=absent")
    recipe = ROOT / "recipes" / f"{name}.yaml"
    with start(name, recipe, *absent, "steps=2", command="dry-run") as run:
        assert run.exit_code() == 0, run.err
        RunRecords.read(run.run_dir).agree()


def test_a_recipe_with_encoder_ranks_runs_dry_as_its_ranks_would_send(start: Start) -> None:
    ranks = ("trainer.encoder.data_parallel=1", "sync.transport=reshard")
    recipe = ROOT / "recipes" / "quickstart-images.yaml"
    with start("encoder", recipe, *ranks, "steps=2", command="dry-run") as run:
        assert run.exit_code() == 0, run.err
        RunRecords.read(run.run_dir).agree()


def test_a_dry_run_takes_a_minute_at_most(
    start: Start, record_property: Callable[[str, object], None]
) -> None:
    with start("dry", ROOT / "recipes" / "quickstart.yaml", command="dry-run") as run:
        assert run.exit_code() == 0
        record_property("dry_run_s", run.wall_s)
        assert run.wall_s < 60
        RunRecords.read(run.run_dir).agree()
