"""Two minutes of kills and freezes, at random, of every kind of process of a run.

``OFFBEAT_FAULT_SEEDS="7 8 9"`` plays other seeds. A seed fixes what is struck and in which order; at
which moment of the run a strike falls depends on the machine, too.
"""

import os
import subprocess
import sys

import pytest

from tests.support.random_faults import RandomFaults
from tests.support.run_records import RunRecords
from tests.support.starting import STUB, Start

SEEDS = tuple(map(int, os.environ.get("OFFBEAT_FAULT_SEEDS", "1").split()))
STEPS, STRUCK_S, UNDISTURBED = 400, 120.0, 40
SETTINGS = (
    f"steps={STEPS}",
    "stub.step_s=0.3",
    "checkpoint.interval=5",
    "generator.engines=2",
    "environment.workers=2",
    # Deadlines that a hung process is found by, and that a busy machine keeps.
    "generator.probe_deadline_s=4",
    "rollout.deadline_s=10",
    "sync.deadline_s=10",
    "trainer.step_deadline_s=10",
    "checkpoint.deadline_s=10",
    # No strike may end the run: that is what budgets are for, and other tests prove.
    "generator.restart_budget=1000",
    "generator.retire_after=1000",
    "trainer.restart_budget=1000",
    "supervision.controller_restart_budget=1000",
    "rollout.infrastructure_retries=1000",
    "rollout.consecutive_failures=1000",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_whose_processes_are_killed_and_frozen_at_random_loses_and_doubles_nothing(
    start: Start, seed: int
) -> None:
    with start(f"random-{seed}", STUB, *SETTINGS) as run:
        faults = RandomFaults(run, seed)
        run.trained_steps(5, within_s=360)
        try:
            faults.strike_for(STRUCK_S, steps=STEPS - UNDISTURBED)
            faults.settle()
        finally:
            print(f"seed {seed}", *faults.strikes, sep="\n")  # noqa: T201 - shown if the test fails
        dead = {each: faults.dead(each) for each in ("engine", "worker", "trainer", "controller")}
        assert run.exit_code(within_s=400) == 0
        run.nothing_is_left()
        run.talks_to_people()

    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    summary = records.summary
    assert (summary.outcome, summary.steps, summary.trainer_version) == ("finished", STEPS, STEPS)
    assert summary.groups.trained == summary.groups.drawn == 4 * STEPS
    assert summary.groups.dropped == {}
    assert summary.max_staleness_trained <= 1
    assert dead == {
        "engine": summary.restarts,
        "worker": summary.worker_restarts,
        "trainer": summary.trainer_restarts,
        "controller": summary.controller_incarnations - 1,
    }
    assert sum(dead.values()) >= 8, "a schedule that hardly kills proves little"
    replay = [sys.executable, "-m", "offbeat", "replay", str(run.run_dir)]
    replayed = subprocess.run(replay, capture_output=True, text=True, check=False, timeout=100)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "summary.json  agrees: finished" in replayed.stdout
