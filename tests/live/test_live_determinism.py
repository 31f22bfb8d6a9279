"""The recipe that promises it repeats bit for bit."""

from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

RECIPE = ROOT / "recipes" / "deterministic.yaml"
SMALL = ("steps=8", "groups_per_step=4", "samples_per_group=4")


def test_two_runs_of_the_deterministic_recipe_are_equal_to_the_last_bit(start: Start) -> None:
    with start("first", RECIPE, *SMALL) as first, start("second", RECIPE, *SMALL) as second:
        assert first.exit_code() == second.exit_code() == 0
        runs = [RunRecords.read(run.run_dir) for run in (first, second)]
    losses = [[line["train/loss"] for line in run.metrics] for run in runs]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]
    assert any(losses[0]), "losses that are all zero prove nothing"
    assert runs[0].summary.weights_digest == runs[1].summary.weights_digest is not None
    assert runs[0].summary.staleness_histogram == {0: 8 * 4 * 4}
