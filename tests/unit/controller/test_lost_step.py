"""Which failures of a step mean that its trainer has to be replaced."""

from offbeat.controller.errors import TrainerLost
from offbeat.controller.trainer_client import lost_step
from offbeat.messages.failures import StepBroken, StepOutOfOrder


def test_a_trainer_that_knows_nothing_of_the_step_is_lost() -> None:
    assert isinstance(lost_step([StepOutOfOrder("seq 2", "a begin")]), TrainerLost)


def test_a_refusal_that_overtakes_the_failed_call_does_not_cost_the_trainer() -> None:
    assert lost_step([StepBroken("seq 2", "an abort")]) is None
