"""Warm-up and decay in samples are those of whole batches, rounded up."""

import pytest

from offbeat.config.limits import schedule_in_steps
from offbeat.config.run import RunConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.trainers.model_trainer import learning_rate


def run_of(groups: int, samples: int) -> RunConfig:
    values = {"steps": 20, "model": {"path": "tiny"}}
    sizes = {"groups_per_step": groups, "samples_per_group": samples}
    return RunConfig.model_validate(values | sizes)


@pytest.mark.parametrize(("samples", "steps"), [(1, 1), (32, 1), (33, 2), (320, 10)])
def test_samples_are_rounded_up_to_whole_steps(samples: int, steps: int) -> None:
    given = OptimizerConfig(schedule="wsd", warmup_samples=samples, decay_samples=samples)
    got = schedule_in_steps(run_of(4, 8), given)
    assert got == OptimizerConfig(schedule="wsd", warmup_steps=steps, decay_steps=steps)


def test_batches_of_another_size_reach_a_rate_after_the_same_samples() -> None:
    given = OptimizerConfig(learning_rate=1e-3, warmup_samples=64)
    small = schedule_in_steps(run_of(1, 8), given)
    large = schedule_in_steps(run_of(2, 8), given)
    for done in range(4):
        after = (done + 1) * 16 // 8 - 1  # steps of 8 that end with the step of 16
        assert learning_rate(small, after, 20) == learning_rate(large, done, 20)


def test_a_schedule_in_steps_stays_as_it_is() -> None:
    given = OptimizerConfig(schedule="cosine", warmup_steps=3)
    assert schedule_in_steps(run_of(4, 8), given) == given
