"""Kills and freezes the processes of a live run at random, and knows what that must have cost."""

import contextlib
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

import psutil

from offbeat.controller.events import AnyEvent, Joined, Opened
from offbeat.controller.journal import read_journal
from tests.support.live_run import LiveRun

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
