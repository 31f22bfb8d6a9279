"""Which failures of a step mean that its trainer has to be replaced."""

import pytest

from offbeat.controller.errors import TrainerLost
from offbeat.controller.trainer_client import lost_step
from offbeat.messages.failures import (
    OffbeatError,
    StepBroken,
    StepOutOfOrder,
    TrainerCall,
    TrainStepFailed,
)

FAILED_FINISH = TrainStepFailed(1, 3, TrainerCall.FINISH, "out of memory")


def test_a_trainer_that_knows_nothing_of_the_step_is_lost() -> None:
    assert isinstance(lost_step([StepOutOfOrder("seq 2", "a begin")]), TrainerLost)


def test_a_refusal_that_overtakes_the_failed_call_does_not_cost_the_trainer() -> None:
    assert lost_step([StepBroken("seq 2", "an abort")]) is None


@pytest.mark.parametrize("other", [None, StepOutOfOrder("seq 2", "a begin")])
def test_after_a_failed_finish_nobody_knows_who_has_stepped(other: OffbeatError | None) -> None:
    lost = lost_step([each for each in (other, FAILED_FINISH) if each is not None])
    assert isinstance(lost, TrainerLost)
    assert "out of memory" in str(lost)


@pytest.mark.parametrize("during", [c for c in TrainerCall if c is not TrainerCall.FINISH])
def test_after_any_other_failed_call_the_step_can_be_aborted(during: TrainerCall) -> None:
    assert lost_step([TrainStepFailed(1, 3, during, "out of memory")]) is None


def test_a_trainer_that_is_lost_stays_lost_whatever_else_failed() -> None:
    gone = TrainerLost("a microbatch", "rank 1 died")
    assert lost_step([StepBroken("seq 2", "an abort"), gone, FAILED_FINISH]) is gone
    assert lost_step([]) is None
