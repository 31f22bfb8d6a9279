"""Tests of the package: the proofs of offbeat, on each part."""

from pathlib import Path

from offbeat_lab.algorithms import bounded, centred
from offbeat_lab.environment import Nearly
from offbeat_lab.sampler import PromptOrder
from offbeat_lab.tracker import LINES
from transformers import AutoTokenizer

from offbeat.testing import (
    prove_advantage,
    prove_environment,
    prove_loss,
    prove_sampler,
    prove_tracker,
)

MODEL = Path(__file__).parents[2] / "models" / "tiny-addition"


def test_the_loss_is_one_that_a_run_accepts() -> None:
    prove_loss(bounded, {"bound": 2.0})


def test_the_advantage_is_one_that_a_run_accepts() -> None:
    prove_advantage(centred)


def test_runs_with_the_sampler_never_stall() -> None:
    prove_sampler(PromptOrder)


def test_the_environment_scores_every_answer() -> None:
    rows = [{"prompt": "3+4=", "answer": "7"}, {"prompt": "1+1=", "answer": "2"}]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prove_environment(Nearly, tokenizer, rows, answers=("7", "8", "", "=="))


def test_the_tracker_writes_every_step(tmp_path: Path) -> None:
    prove_tracker(LINES, {}, tmp_path)
