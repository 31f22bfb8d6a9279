"""Tensor ranks of the torch trainer behind Ray: one is killed, one hangs, and other layouts go on."""

import subprocess
import sys

import pytest

from offbeat.controller.events import Rewound
from tests.support.live_run import LiveRun
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RECIPE = ROOT / "recipes" / "deterministic.yaml"
STEPS, MORE = 32, 40
SMALL = (
    "model.dtype=float64",  # rounding that depends on the layout is too small to change a sample
    "groups_per_step=4",
    "samples_per_group=4",
    "checkpoint.interval=3",
    "trainer.step_deadline_s=40",  # by which a rank that hangs is found out
    "trainer.optimizer.schedule=constant",  # a resume takes more steps than were planned
)
COMPARED = ("train/loss", "train/grad_norm", "train/reward")
ONE, TWO, FOUR = (
    (f"trainer.tensor_parallel={tensor}", f"trainer.data_parallel={data}")
    for tensor, data in ((1, 1), (2, 1), (2, 2))
)


@pytest.fixture(scope="module")
def alone(start: Start) -> dict[int, dict[str, float]]:
    """The values of a run of one rank, by step."""
    with start("alone", RECIPE, *SMALL, f"steps={MORE}") as run:
        assert run.exit_code(within_s=300) == 0
    return values_by_step(RunRecords.read(run.run_dir))


@pytest.mark.parametrize(
    ("layout", "killed", "hung", "then"),
    [(TWO, 1, 0, FOUR), (FOUR, 2, 3, TWO), (TWO, 0, 1, ONE)],
    ids=["tp2, then tp2 x dp2", "tp2 x dp2, then tp2", "tp2, then one rank"],
)
def test_a_run_that_lost_tensor_ranks_and_is_resumed_under_another_layout_is_the_run_of_one_rank(
    start: Start,
    alone: dict[int, dict[str, float]],
    layout: tuple[str, ...],
    killed: int,
    hung: int,
    then: tuple[str, ...],
) -> None:
    """Losses, gradient norms and rewards of each step; and the journal folds to what was written."""
    with start(f"lost{killed}{hung}", RECIPE, *SMALL, *layout, f"steps={STEPS}") as lost:
        lost.logged("trainer.ready", within_s=600)
        lost.trained_steps(4, within_s=600)
        lost.holding(f"trainer-rank{killed}.log").kill()
        lost.trains_on(within_s=600)
        lost.holding(f"trainer-rank{hung}.log").suspend()
        assert lost.exit_code(within_s=400) == 0
        lost.nothing_is_left()
    rewinds = [each for each in RunRecords.read(lost.run_dir).events if isinstance(each, Rewound)]
    assert len(rewinds) == 2
    assert all(each.to_version % 3 == 0 for each in rewinds)
    resume = ("--resume", str(lost.run_dir))
    with start("resumed", None, f"steps={MORE}", *then, *resume) as resumed:
        assert resumed.exit_code(within_s=300) == 0
    records = RunRecords.read(lost.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    agrees_when_replayed(lost)
    got = values_by_step(records)
    assert got.keys() == alone.keys() == set(range(1, MORE + 1))
    assert any(values["train/grad_norm"] for values in alone.values())
    for step, values in alone.items():
        assert got[step] == pytest.approx(values, rel=1e-6, abs=1e-9), step


def agrees_when_replayed(run: LiveRun) -> None:
    replay = [sys.executable, "-m", "offbeat", "replay", str(run.run_dir)]
    replayed = subprocess.run(replay, capture_output=True, text=True, check=False, timeout=100)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "summary.json  agrees: finished" in replayed.stdout


def values_by_step(records: RunRecords) -> dict[int, dict[str, float]]:
    """Return what the last line of each step says."""
    return {line["step"]: {name: line[name] for name in COMPARED} for line in records.metrics}
