"""A whole run of the recipe with an environment of verifiers. Skipped without: ``make test-verifiers``."""

import json
import shutil
from pathlib import Path

import pytest

from offbeat.runs.replay import replay
from tests.support.live_run import LiveRun

pytest.importorskip("verifiers", reason="the extra verifiers is not installed")

pytestmark = [pytest.mark.environments, pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]


def test_a_run_trains_on_tasks_of_verifiers_and_every_group_is_accounted_for(
    tmp_path: Path,
) -> None:
    recipe = ROOT / "recipes" / "verifiers-sums.yaml"
    shutil.copy(ROOT / "examples" / "verifiers" / "tiny_sums.py", tmp_path)
    train = ["train", str(recipe), "steps=3", "wandb.mode=disabled"]
    with LiveRun(train, run_dir=tmp_path / "run", cwd=tmp_path) as run:
        assert run.exit_code(within_s=500) == 0, run.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert (summary["outcome"], summary["steps"]) == ("finished", 3)
    assert replay(tmp_path / "run").agrees
