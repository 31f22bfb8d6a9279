"""Commands that the table at the end of a run offers."""

from pathlib import Path

import msgspec
import pytest

from offbeat.config.run import RunConfig
from offbeat.launch.screen import next_commands
from offbeat.launch.session import compose_resume_command
from offbeat.telemetry.summary import GroupCounts, Summary

FINISHED = Summary(
    run_id="run-1",
    name="mine",
    outcome="finished",
    steps=5,
    trainer_version=5,
    groups=GroupCounts(drawn=10, trained=10),
    wall_s=1.0,
)
RECIPE = RunConfig.model_validate({"steps": 5, "model": {"path": "nowhere"}})


@pytest.mark.parametrize(
    "change", [{"outcome": "aborted"}, {"outcome": "failed"}, {"ended_by": "offbeat control stop"}]
)
def test_a_run_that_ended_early_names_the_command_that_goes_on(change: dict[str, str]) -> None:
    summary = msgspec.structs.replace(FINISHED, **change)
    run = Path("/data/my runs/mine")
    offered = next_commands(run, summary, compose_resume_command(run, RECIPE))
    assert offered.endswith("\nresume     offbeat train --resume '/data/my runs/mine'")
    assert "resume" not in next_commands(run, summary, "")


def test_a_finished_run_names_its_page_alone() -> None:
    offered = next_commands(Path("runs/mine"), FINISHED, "offbeat train --resume runs/mine")
    assert offered == "next\none page   offbeat report runs/mine"
