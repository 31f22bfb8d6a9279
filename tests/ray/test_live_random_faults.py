"""Two minutes of kills and freezes, at random, of every kind of process of a run.

``OFFBEAT_FAULT_SEEDS="7 8 9"`` plays other seeds. A seed fixes what is struck and in which order; at
which moment of the run a strike falls depends on the machine, too.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

import psutil
import pytest

from offbeat.controller.events import AnyEvent, Joined, Opened
from offbeat.controller.journal import read_journal
from tests.support.live_run import LiveRun
from tests.support.run_records import RunRecords
from tests.support.starting import STUB, Start

TARGETS: Final = {
    "generator-0": "engine",
    "generator-1": "engine",
    "environment-0": "worker",
    "environment-1": "worker",
    "trainer-rank0": "trainer",
    "controller": "controller",
}
"""Logs of the processes that are struck, each with the component that counts its restarts."""
_GAP_S: Final = (0.0, 5.0)  # between two strikes
_NAP_S: Final = (0.2, 2.0)  # a freeze that no deadline notices
_COMA_S: Final = 30.0  # a freeze that goes on until the process is replaced, or for so long
_RECOVERED_S: Final = 100.0  # until a target that was struck is at work again, on a busy machine
_JOURNAL_S: Final = 0.5  # between two looks into the journal, which is read whole
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


@dataclass(frozen=True)
class _Frozen:
    process: psutil.Process
    until: float


class RandomFaults:
    """Strikes one target after another, whatever the run is busy with.

    A target is struck only when its process is known to the run: the restart of a process that never
    answered is seen by nobody, so no count could include it. Several targets may be down at once.

    ``dead`` says what the run must have counted. A killed process counts once. A frozen process
    counts once when the run took it for hung and replaced it, and not at all when it went on in
    time: a restart is a process that takes the place of another, and a pause replaces nothing. So
    the expected count of a component is the number of its struck processes that are dead, which is
    looked up in the process table and not in what the run says of itself.
    """

    def __init__(self, run: LiveRun, seed: int) -> None:
        self.strikes = list[str]()
        """What was done, in order: told when a test fails."""
        self._run, self._dice = run, random.Random(seed)
        self._struck = dict[psutil.Process, str]()  # processes, with their target
        self._frozen = dict[str, _Frozen]()  # by target
        self._events, self._read_at = list[AnyEvent](), 0.0

    def strike_for(self, seconds: float, *, steps: int) -> None:
        """PlannedFault until the time is over, or the trainer has applied ``steps`` steps."""
        started, run = time.monotonic(), self._run
        while time.monotonic() < started + seconds and run.steps_so_far < steps:
            due = time.monotonic() + self._dice.uniform(*_GAP_S)
            run.until("the time of the next strike", partial(self._is_time, due))
            target, nap_s = self._dice.choice(list(TARGETS)), self._dice.uniform(*_NAP_S)
            action = self._dice.choice(["kill", "kill", "nap", "coma"])
            if target in self._frozen:
                continue
            process = run.until(
                f"{target} is at work ({self.strikes})",
                partial(self._at_work, target),
                within_s=_RECOVERED_S,
            )
            with contextlib.suppress(psutil.NoSuchProcess):  # the run has just replaced it
                self._strike(target, process, action, nap_s)
                self.strikes.append(f"{time.monotonic() - started:.1f} s: {action} {target}")

    def settle(self) -> None:
        """Let every frozen process go on, and wait until every target is at work."""
        for frozen in self._frozen.values():
            _resume(frozen.process)
        self._frozen.clear()
        for target in TARGETS:
            self._run.until(
                f"{target} is at work in the end ({self.strikes})",
                partial(self._at_work, target),
                within_s=_RECOVERED_S,
            )

    def dead(self, component: str) -> int:
        """Processes of a component that were struck and are no more."""
        own = [p for p, target in self._struck.items() if TARGETS[target] == component]
        return sum(not _is_alive(process) for process in own)

    def _strike(self, target: str, process: psutil.Process, action: str, nap_s: float) -> None:
        if action == "kill":
            process.kill()
            process.wait()
        else:
            process.suspend()
            # The driver waits a minute for a frozen controller: a coma would be most of the test.
            nap = action == "nap" or target == "controller"
            lasts_s = nap_s if nap else _COMA_S
            self._frozen[target] = _Frozen(process, time.monotonic() + lasts_s)
        self._struck[process] = target

    def _is_time(self, due: float) -> bool:
        self._thaw()
        return time.monotonic() >= due

    def _thaw(self) -> None:
        for target, frozen in list(self._frozen.items()):
            if time.monotonic() >= frozen.until or not _is_alive(frozen.process):
                _resume(frozen.process)
                del self._frozen[target]

    def _at_work(self, target: str) -> psutil.Process | None:
        """The process of a target, once the run has had an answer from it."""
        self._thaw()
        if target in self._frozen or time.monotonic() < self._read_at + _JOURNAL_S:
            return None
        self._events = list(read_journal(self._run.run_dir / "journal"))
        self._read_at = time.monotonic()
        process = self._run.holding(f"{target}.log")
        return process if self._is_known(target, process) else None

    def _is_known(self, target: str, process: psutil.Process) -> bool:
        if target == "controller":
            incarnations = [
                event.incarnation for event in self._events if isinstance(event, Opened)
            ]
            return len(incarnations) == self.dead("controller") + 1
        names = {"trainer-rank0": "trainer"}
        joined = [
            event.incarnation
            for event in self._events
            if isinstance(event, Joined) and event.name == names.get(target, target)
        ]
        return bool(joined) and joined[-1].split("-")[-2] == str(process.pid)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has been replaced
        process.resume()


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
