"""What ``offbeat check`` says of warm-up and minibatches: runs that start, but not as intended."""

from typing import Any

import pytest

from offbeat.config.run import RunConfig
from offbeat.launch.checks.algorithm import check_optimizer_steps


def warnings(**values: Any) -> list[str]:
    recipe = {"steps": 10, "model": {"path": "m"}, "groups_per_step": 8, "samples_per_group": 4}
    found = check_optimizer_steps(RunConfig.model_validate(recipe | values))
    return [str(each) for each in found]


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        ({"warmup_steps": 40}, "trainer.optimizer.warmup_steps=40 is more than steps=10"),
        ({"warmup_samples": 1280}, "trainer.optimizer.warmup_samples=1280, 40 steps, is more than"),
    ],
)
def test_a_warm_up_longer_than_the_run_is_said_with_the_rate_that_is_reached(
    optimizer: dict[str, int], named: str
) -> None:
    (text,) = warnings(trainer={"optimizer": {"learning_rate": 4e-6, **optimizer}})
    assert named in text
    assert "the rate rises to 1e-06 at the last step" in text


def test_a_warm_up_that_ends_with_the_run_is_fine() -> None:
    assert not warnings(trainer={"optimizer": {"warmup_steps": 10}})


def test_minibatches_with_fewer_groups_than_ranks_are_said_with_what_fills_them() -> None:
    (text,) = warnings(algorithm={"minibatches": 3}, trainer={"data_parallel": 4})
    assert "algorithm.minibatches=3 of groups_per_step=8 have 2 groups or one more, for 4" in text
    assert "Set algorithm.minibatches to 2 or less, or groups_per_step to 12 or more." in text
    assert not warnings(algorithm={"minibatches": 2}, trainer={"data_parallel": 4})
    grown = {"groups_per_step": 12, "algorithm": {"minibatches": 3}}
    assert not warnings(**grown, trainer={"data_parallel": 4})


def test_a_stub_trainer_has_neither() -> None:
    assert not warnings(algorithm={"minibatches": 8}, trainer={"backend": "stub"})
