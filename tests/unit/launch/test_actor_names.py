"""The names under which the actors of a run are known on a cluster."""

from dataclasses import replace
from pathlib import Path

from offbeat.config.run import RunConfig
from offbeat.launch.cluster import global_name
from offbeat.launch.run_parts import RunSpec

CONFIG = RunConfig.model_validate({"steps": 1, "model": {"path": "none"}})


def test_a_resumed_run_does_not_ask_for_names_that_actors_of_its_killed_driver_still_hold() -> None:
    killed = RunSpec(CONFIG, "run-1", Path("run"), Path(), driver="aaaa")
    resumed = replace(killed, driver="bbbb")
    assert global_name(killed, "generator-0") != global_name(resumed, "generator-0")
