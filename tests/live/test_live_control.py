"""What an operator does to a run while it goes on, and what is found out about it, then and after."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from offbeat.controller.events import Opened
from offbeat.controller.journal import recover
from tests.support.live_run import LiveRun, offbeat
from tests.support.run_records import RunRecords
from tests.support.starting import STUB, Start


def steps_of(run_dir: Path) -> int:
    return recover(run_dir / "journal").trainer_version


def asked_of_controllers(run: LiveRun) -> list[str]:
    lines = (run.run_dir / "logs" / "controller.log").read_text().splitlines()
    return [json.loads(line)["command"] for line in lines if '"run.command"' in line]


# --- a run that is controlled --------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(start: Start, runtime: str) -> Iterator[LiveRun]:
    """A run that was paused, resumed and then stopped. On Ray its controller died meanwhile."""
    with start("controlled", STUB, "steps=100000", "checkpoint.interval=10") as run:
        run.trained_steps(3)
        for command, sentence in (
            (("replay", run.run_dir), "the journal and the run's other files agree"),
            (("why", run.run_dir, 0), "g-000000"),
        ):
            code, text = offbeat(*command)
            assert code == 0, text
            assert sentence in text

        code, text = offbeat("train", "--resume", run.run_dir)
        assert (code, "its run is alive. End it first" in text) == (2, True), text

        assert offbeat("control", run.run_dir, "pause") == (0, f"{run.run_dir}: pause\n")
        run.logged("run.command")
        steps = steps_of(run.run_dir)
        for _ in range(2):  # takes the time of many steps
            assert offbeat("replay", run.run_dir)[0] == 0
        assert steps_of(run.run_dir) <= steps + 1, "one that had begun may end"
        paused_at = steps_of(run.run_dir)

        if runtime == "ray":
            run.actor("ControllerActor").kill()
            told = partial(asked_of_controllers, run)
            run.until("the next controller is told too", lambda: len(told()) == 2)
        assert offbeat("why", run.run_dir, "g-000001")[0] == 0
        assert steps_of(run.run_dir) == paused_at, "a paused run trains no step"
        code, text = offbeat("verify-weights", run.run_dir, "--engine")
        assert code == 2
        assert "load    generator-0, version" in text
        assert "cannot read back the weights that it serves" in text, "it is a stub"

        assert offbeat("control", run.run_dir, "resume")[0] == 0
        run.until("training goes on", lambda: steps_of(run.run_dir) >= paused_at + 5)
        assert offbeat("control", run.run_dir, "stop")[0] == 0
        assert run.exit_code(within_s=90) == 0
        yield run


@pytest.mark.both_runtimes
def test_a_stopped_run_finishes_in_order(stopped: LiveRun) -> None:
    records = RunRecords.read(stopped.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.outcome == "finished"
    assert 8 <= records.summary.trainer_version < 100_000
    stopped.nothing_is_left()
    stopped.talks_to_people()


@pytest.mark.only_ray
def test_a_next_controller_is_told_what_the_one_before_was(stopped: LiveRun) -> None:
    told = asked_of_controllers(stopped)
    assert told == ["Pause", "Pause", "Resume", "Stop"]
    incarnations = [e for e in RunRecords.read(stopped.run_dir).events if isinstance(e, Opened)]
    assert len(incarnations) == 2


@pytest.mark.both_runtimes
def test_a_run_that_has_ended_takes_no_commands(stopped: LiveRun) -> None:
    code, text = offbeat("control", stopped.run_dir, "pause")
    assert (code, "its run has ended" in text) == (2, True), text


@pytest.mark.both_runtimes
def test_a_finished_run_is_replayed_and_its_groups_explained(
    stopped: LiveRun, runtime: str
) -> None:
    code, text = offbeat("replay", stopped.run_dir)
    assert code == 0, text
    assert "summary.json  agrees: finished" in text
    assert ("incarnation 2 from 20" in text) == (runtime == "ray")
    code, text = offbeat("why", stopped.run_dir, "g-000000")
    assert code == 0
    assert re.search(r"now: trained in step (\d+), which made version \1\b", text)


@pytest.mark.both_runtimes
def test_the_timeline_has_lanes_for_pumps_engines_ranks_and_groups(stopped: LiveRun) -> None:
    events = json.loads((stopped.run_dir / "trace.json").read_text())
    named = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    for kind in ("pumps", "engines", "trainer ranks", "groups"):
        assert any(kind in name for name in named), named
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"train pump", "rollout pump", "sync pump", "generator-0"} <= lanes
    assert all(e.get("dur", 0) >= 0 for e in events)


@pytest.mark.both_runtimes
def test_nearly_all_time_of_trainer_and_engines_is_attributed(stopped: LiveRun) -> None:
    records = RunRecords.read(stopped.run_dir)
    for who in ("trainer", "generator"):
        column = [line[f"busy/{who}_unattributed_fraction"] for line in records.metrics]
        assert fmean(column) <= 0.01
    told = records.summary
    assert sum(told.trainer_waits.values()) + told.trainer_busy_fraction == pytest.approx(1)
    assert sum(told.generator_waits.values()) + told.generator_busy_fraction == pytest.approx(1)


# --- a run that is cut off -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def crashed(start: Start) -> Path:
    """The directory of a run of 60 steps all of whose processes died at once."""
    with start("crashed", STUB, "steps=60", "checkpoint.interval=4") as run:
        run.trained_steps(9)
        run.kill_everything()
        return run.run_dir


def test_a_crashed_run_is_replayed_and_its_groups_explained(crashed: Path) -> None:
    code, text = offbeat("replay", crashed)
    assert code == 0, text
    assert "summary.json  not written" in text
    code, text = offbeat("why", crashed, 0)
    assert code == 0, text
    assert re.search(r"now: trained in step \d+", text)


def test_a_crashed_run_obeys_nobody_and_says_how_to_go_on(crashed: Path) -> None:
    code, text = offbeat("control", crashed, "pause", "--wait", 0)
    assert code == 1
    assert f"Is the run alive? If not: offbeat train --resume {crashed}" in text


def test_a_crashed_run_does_not_go_on_with_another_seed(crashed: Path) -> None:
    code, text = offbeat("train", "--resume", crashed, "seed=5")
    assert code == 2
    assert "seed is 5, the run has 0. Keep these as they were" in text
    assert "or start a new run" in text


@pytest.mark.long
def test_a_crashed_run_goes_on_to_more_steps_than_it_was_to_have(
    crashed: Path, start: Start
) -> None:
    with start("crashed", None, "steps=64", "--resume", str(crashed)) as run:
        assert run.exit_code() == 0
        run.nothing_is_left()
    records = RunRecords.read(crashed)
    records.agree()
    assert records.summary.trainer_version == 64
    assert records.summary.groups.trained == records.summary.groups.drawn == 256
    assert sum(records.summary.staleness_histogram.values()) == 256 * 4
    code, text = offbeat("replay", crashed)
    assert code == 0, text
    assert "steps: 64" in (crashed / "config.yaml").read_text()
