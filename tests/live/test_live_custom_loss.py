"""A loss of the user's own trains as the built-in one with the same formula, on both runtimes."""

from pathlib import Path
from typing import Any, Final

import pytest

import offbeat
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

RECIPE: Final = ROOT / "recipes" / "deterministic.yaml"
SMALL: Final = ("steps=2", "groups_per_step=4", "samples_per_group=4")
MINE: Final = """
import torch

def loss(tokens, options):
    ratio_N = (tokens.logprobs_N - tokens.old_N).exp()
    bounded_N = ratio_N.clamp(1 - options["low"], 1 + options["high"])
    loss_N = -torch.minimum(ratio_N * tokens.advantages_N, bounded_N * tokens.advantages_N)
    return loss_N, {"ratio": ratio_N.detach()}

def averaged(tokens, options):
    return loss(tokens, options)[0].mean()
"""
IN_PYTHON: Final[dict[str, Any]] = {
    "steps": 2,
    "groups_per_step": 4,
    "samples_per_group": 4,
    "runtime": "local",
    "wandb.mode": "disabled",
    "quiet": True,
}
OPTIONS: Final = "algorithm.loss.options={low: 0.2, high: 0.3}"


def test_two_steps_end_in_the_weights_of_the_built_in_loss(start: Start, tmp_path: Path) -> None:
    (tmp_path / "my_live_loss.py").write_text(MINE)
    own = ("algorithm.loss.target=my_live_loss:loss", OPTIONS)
    with (
        start("built-in", RECIPE, *SMALL) as built_in,
        start("own", RECIPE, *SMALL, *own, cwd=tmp_path) as mine,
    ):
        assert built_in.exit_code() == mine.exit_code() == 0, mine.err
        wanted, got = RunRecords.read(built_in.run_dir), RunRecords.read(mine.run_dir)
    assert got.summary.weights_digest == wanted.summary.weights_digest is not None
    for one, other in zip(got.metrics, wanted.metrics, strict=True):
        assert one["train/loss"] == other["train/loss"]
        assert one["loss/ratio"] == pytest.approx(other["train/ratio_mean"])
    assert any(line["train/grad_norm"] for line in got.metrics), "no gradient proves nothing"


def test_a_dry_run_finds_a_loss_that_is_not_one_per_token(start: Start, tmp_path: Path) -> None:
    (tmp_path / "my_live_loss.py").write_text(MINE)
    own = ("algorithm.loss.target=my_live_loss:averaged", OPTIONS)
    with start("dry", RECIPE, *SMALL, *own, command="dry-run", cwd=tmp_path) as run:
        assert run.exit_code() == 1
        assert "my_live_loss:averaged: the loss has shape []" in run.err
        run.nothing_is_left()


def scaled(tokens: Any, options: Any) -> Any:
    return -(tokens.logprobs_N - tokens.old_N).exp() * tokens.advantages_N * options.get("scale", 1)


def test_a_loss_by_value_trains_and_is_given_again_for_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm.loss.normalize": "sequences", **IN_PYTHON}
    run = offbeat.train(RECIPE, loss=scaled, run_dir=tmp_path / "run", **settings)
    assert run.config.algorithm.loss.name == "custom"
    assert run.config.algorithm.loss.normalize == "sequences"
    with pytest.raises(
        offbeat.RunRefused, match=r"algorithm\.loss\.target leads to different source"
    ):
        offbeat.resume(run.directory, loss=lambda t, o: -scaled(t, o), steps=3, quiet=True)
    further = offbeat.resume(run.directory, loss=scaled, steps=3, quiet=True)
    assert further.summary["steps"] == 3


def centred(rewards: tuple[float, ...]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [each - mean for each in rewards]


def test_an_advantage_by_value_trains_as_the_built_in_one(tmp_path: Path) -> None:
    mine, built_in = (
        offbeat.train(RECIPE, run_dir=tmp_path / name, advantage=advantage, **IN_PYTHON)
        for name, advantage in (("mine", centred), ("built-in", "grpo_no_std"))
    )
    assert mine.summary["weights_digest"] == built_in.summary["weights_digest"] is not None
    for step in (1, 2):
        got, want = (run.samples(step)["advantage"].tolist() for run in (mine, built_in))
        assert got == pytest.approx(want)
    with pytest.raises(offbeat.RunRefused, match=r"algorithm\.advantage leads to different source"):
        offbeat.resume(mine.directory, advantage=lambda rewards: [*rewards], steps=3, quiet=True)
    further = offbeat.resume(mine.directory, advantage=centred, steps=3, quiet=True)
    assert further.summary["steps"] == 3
