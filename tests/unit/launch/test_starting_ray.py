"""What a start of Ray that fails is said to be, and what a cluster has no room for."""

import pytest

from offbeat.config.limits import RankResources
from offbeat.config.run import RunConfig
from offbeat.launch.cluster import (
    NoRoom,
    RayNotStarted,
    check_total,
    rank_options,
    why_not_started,
)


def test_a_start_that_takes_too_long_is_put_down_to_busy_cores() -> None:
    told = str(why_not_started(Exception("The current node timed out\nduring startup.")))
    assert told == (
        "Ray did not start on this machine: The current node timed out during startup. "
        "Stop what keeps its cores busy, or join a cluster that runs: RAY_ADDRESS=..."
    )


def test_a_place_that_ray_cannot_use_is_told_with_the_variables_that_set_it() -> None:
    too_long = OSError("AF_UNIX path length cannot exceed 107 bytes: a/b/c")
    told = why_not_started(too_long)
    assert isinstance(told, RayNotStarted)
    assert "107 bytes: a/b/c. Set RAY_TMPDIR to a short path, and HOME to" in str(told)


@pytest.mark.parametrize("error", [ConnectionError("no cluster"), RuntimeError("ray says why")])
def test_an_error_that_says_what_it_is_stays_what_it_is(error: Exception) -> None:
    assert why_not_started(error) is None


def test_actors_that_fit_alone_and_not_together_are_told_before_they_wait_for_each_other() -> None:
    config = RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": "m"},
            "trainer": {"cpus": 1, "data_parallel": 2},
            "generator": {"cpus": 0.5, "engines": 3},
        }
    )
    check_total(config, [{"CPU": 2.0}, {"CPU": 1.5}])
    with pytest.raises(NoRoom) as refused:
        check_total(config, [{"CPU": 2.0}])
    assert str(refused.value) == (
        "the run of 2 trainer ranks and 3 engines can never be scheduled: it asks for 3.5 CPU, but "
        "the largest machine of the cluster has 2. Lower trainer.cpus or generator.cpus, or add a "
        "machine"
    )


def test_a_trainer_rank_handles_one_call_at_a_time() -> None:
    assert rank_options(RankResources(cpus=2, gpus=1, threads=1))["max_concurrency"] == 1
