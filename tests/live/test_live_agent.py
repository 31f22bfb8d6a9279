"""Runs of an agent: episodes in processes of their own, the endpoint in a real worker."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from offbeat.controller.events import Committed, StepApplied
from offbeat.messages.groups import SampleStatus
from tests.support.live_run import LiveRun
from tests.support.run_records import RunRecords
from tests.support.starting import Start

_SLOW_S = 480.0
"""For what takes seconds on a machine that does nothing else."""

HERE = Path(__file__).parent
RECIPE = HERE / "live_agent.yaml"
ENDLESS = "steps=100000"
"""Of a run that is stopped when the test has seen what it waits for."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory with the agent in it."""
    shutil.copy(HERE / "live_agents.py", tmp_path)
    return tmp_path


def _ended(run: LiveRun) -> RunRecords:
    """Wait for the end of a run whose accounts agree, and that leaves no process behind."""
    assert run.exit_code() == 0, run.err
    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.outcome == "finished"
    assert records.summary.groups.dropped == {}
    run.nothing_is_left()
    return records


def test_a_run_trains_the_conversations_and_the_branches_of_an_agent(
    start: Start, project: Path
) -> None:
    with start("plain", RECIPE, "steps=3", cwd=project) as run:
        records = _ended(run)
    receipts = [event.receipt for event in records.events if isinstance(event, Committed)]
    assert {receipt.turns for receipt in receipts} == {(2, 2, 2, 2)}
    assert {receipt.branches for receipt in receipts} == {(), (2, 2, 2, 2)}
    assert all(min(receipt.valid_tokens) >= 2 for receipt in receipts)
    assert {event.samples for event in records.events if isinstance(event, StepApplied)} == {8}


@pytest.mark.only_ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_in_the_middle_of_turns_lose_no_group_and_train_none_twice(
    start: Start, project: Path
) -> None:
    """``kill -9`` of an agent's process, its engine and its worker, each between two turns."""
    stops_at = project / "stop"
    waits = f"environment.options={{stops_at: {stops_at}}}"
    alone = "environment.episodes_per_child=1"  # so that a killed process is one sample's failure
    with start("kills", RECIPE, ENDLESS, waits, alone, cwd=project) as run:
        run.trained_steps(2, within_s=_SLOW_S)
        os.kill(_between_its_turns(run, stops_at), signal.SIGKILL)
        run.trains_on(within_s=_SLOW_S)
        held = _between_its_turns(run, stops_at)
        run.actor("EnvironmentActor").kill()
        run.until("the episode is over", partial(_is_gone, held), within_s=_SLOW_S)
        run.trains_on(within_s=_SLOW_S)
        _between_its_turns(run, stops_at)
        run.actor("EmbeddedEngineActor").kill()
        stops_at.with_suffix(".go").touch()  # its next question finds no engine
        run.trains_on(within_s=_SLOW_S)
        run.stop()
        records = _ended(run)
    assert (records.summary.restarts, records.summary.worker_restarts) == (1, 1)
    steps = [event for event in records.events if isinstance(event, StepApplied)]
    receipts = {
        event.receipt.prompt_index: event.receipt
        for event in records.events
        if isinstance(event, Committed)
    }
    (killed,) = (receipt for receipt in receipts.values() if receipt.masked_samples)
    at = killed.statuses.index(SampleStatus.MASKED)
    assert killed.finish_reasons[at] == "agent_process_died"
    assert sum(step.masked_samples for step in steps) == 1
    with start(
        "kills", None, f"steps={len(steps) + 2}", "--resume", str(run.run_dir), cwd=project
    ) as again:
        assert _ended(again).summary.trainer_version == len(steps) + 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_kill_of_a_process_that_samples_share_costs_each_of_them_another_try_at_most(
    start: Start, project: Path
) -> None:
    stops_at = project / "stop"
    waits = f"environment.options={{stops_at: {stops_at}}}"
    one = "environment.reward_workers=1"  # so that all samples of the worker share a process
    retry = ("rollout.on_failed_sample=retry", "rollout.sample_retries=1")
    with start("shared", RECIPE, ENDLESS, waits, one, *retry, cwd=project) as run:
        run.trained_steps(2, within_s=_SLOW_S)
        for _ in range(2):
            os.kill(_between_its_turns(run, stops_at), signal.SIGKILL)
            run.trains_on(within_s=_SLOW_S)
        run.stop()
        records = _ended(run)
    steps = [event for event in records.events if isinstance(event, StepApplied)]
    trained = [index for step in steps for index in step.prompt_indices]
    assert len(trained) == len(set(trained)), "no group is trained twice"
    receipts = {
        event.receipt.prompt_index: event.receipt
        for event in records.events
        if isinstance(event, Committed)
    }
    masked = sum(receipts[index].masked_samples for index in trained)
    assert masked == sum(step.masked_samples for step in steps)
    assert {step.samples + step.masked_samples for step in steps} == {8}
    retried = [each for each in receipts.values() if each.retried_samples]
    assert sum(each.retried_samples for each in retried) >= 2, "one for each kill at least"
    assert all(each.valid_rewards for each in retried)
    assert (records.summary.restarts, records.summary.worker_restarts) == (0, 0)


def _between_its_turns(run: LiveRun, stops_at: Path) -> int:
    """Wait until an episode waits between its turns, and return its process id."""
    waits = stops_at.with_suffix(".pid")
    stops_at.touch()
    run.until("an episode between its turns", waits.exists, within_s=_SLOW_S)
    pid = int(waits.read_text())
    waits.unlink()
    return pid


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)
