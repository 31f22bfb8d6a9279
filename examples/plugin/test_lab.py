"""Tests of the package: the proofs that a run makes when it starts."""

from offbeat_lab.algorithms import bounded, centred

from offbeat.testing import prove_advantage, prove_loss


def test_the_loss_is_one_that_a_run_accepts() -> None:
    prove_loss(bounded, {"bound": 2.0})


def test_the_advantage_is_one_that_a_run_accepts() -> None:
    prove_advantage(centred)
