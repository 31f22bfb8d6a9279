"""CPU seconds of the trainer's ranks, by step."""

import itertools

from offbeat.messages.training import StepResult
from offbeat.trainers.cpu_time import CpuTime
from offbeat.trainers.memory import with_highest


def test_a_step_has_the_cpu_seconds_since_the_step_before_however_often_it_is_reported() -> None:
    cpu = CpuTime(itertools.accumulate([100.0, 2.0, 5.0]).__next__)
    assert cpu.report("step 1") == {}, "the start is not part of a step"
    assert cpu.report("step 2") == {"cpu/trainer_s": 2.0}
    assert cpu.report("step 2") == {"cpu/trainer_s": 2.0}
    assert cpu.report("step 3") == {"cpu/trainer_s": 5.0}


def result(**metrics: float) -> StepResult:
    named = {f"cpu/{name}": value for name, value in metrics.items()}
    return StepResult(True, 0.0, 0.0, 0.0, 1, 1, 1, named)  # noqa: FBT003 - its first field


def test_the_ranks_of_a_trainer_are_added_up_and_a_rank_that_started_anew_leaves_it_open() -> None:
    ranks = [result(trainer_s=1.0), result(trainer_s=2.5)]
    assert with_highest(ranks).metrics == {"cpu/trainer_s": 3.5}
    assert "cpu/trainer_s" not in with_highest([result(), result(trainer_s=2.5)]).metrics
