"""`offbeat eval`: a model is scored without a trainer."""

from pathlib import Path

import pytest

from offbeat.algorithms.eval_scores import scores_by_set
from offbeat.telemetry.evaluation_files import evaluation_files, read_evaluation
from tests.support.starting import ROOT, Start


@pytest.mark.parametrize("dry", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_recipe_is_evaluated_alone(start: Start, dry: bool) -> None:
    recipe = ROOT / "recipes" / "quickstart.yaml"
    sets = ("eval.sets.few={prompts: 4, samples: 2}", "eval.sets.more.prompts=9")
    how = ["--dry-run"] if dry else ["generator.engines=2"]
    with start(f"alone{dry:d}", recipe, *sets, *how, command="eval") as run:
        assert run.exit_code() == 0, run.err
        ((due, path),) = evaluation_files(Path(run.run_dir))
        samples = read_evaluation(path).samples
        assert all((sample.response is None) == dry for sample in samples), "a stub has no text"
        scores = scores_by_set(samples)
        sizes = {name: (each.prompts, each.samples) for name, each in scores.items()}
        assert (due, sizes) == (0, {"few": (4, 8), "more": (9, 9)})
        assert (scores["few"].majority is None) == dry, "a stub has no answers"
        assert "mean@2" in run.out
        assert "pass@2" in run.out
