"""A schedule of faults, drawn from a seed, and played on the processes of a live run.

The simulator plays the same file; what a strike of it means there, it means here: ``at_step`` n is the
first time that the trainer applies version n.
"""

import contextlib
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
import psutil

from offbeat.controller.ledger import Ledger
from offbeat.plugins.simulation.schedule import PlannedFault
from tests.support.live_run import LiveRun, until

ENGINES: Final = 2
THAWED_S: Final = 2.5  # until a frozen process goes on, if nobody has replaced it
_VICTIMS: Final = {
    "engine_killed": "generator-0",
    "engine_frozen": "generator-1",
    "worker_frozen": "environment-0",
    "trainer_killed": "trainer",
    "controller_killed": "controller",
}
_LOGS: Final = {"trainer": "trainer-rank0"}  # the log of a target, where it has another name


def draw(seed: int, *, steps: int) -> list[PlannedFault]:
    """Every action once, in any order, each some steps after the last."""
    rng = random.Random(seed)
    actions = rng.sample(list(_VICTIMS), len(_VICTIMS))
    apart = (steps - 4) // len(actions)
    return [
        PlannedFault(
            action, _VICTIMS[action], at_step=2 + apart * place + rng.randrange(apart // 2)
        )
        for place, action in enumerate(actions)
    ]


def strike_live(run: LiveRun, planned_faults: Sequence[PlannedFault]) -> None:
    """Kill and freeze the processes of a run as planned; return once all of them have."""
    frozen = list[tuple[float, psutil.Process]]()

    def reached(step: int) -> bool:
        _thaw(frozen)
        return step in _applied(run)

    for strike in sorted(planned_faults, key=lambda each: each.at_step or 0):
        step = strike.at_step or 0
        run.until(f"version {step}, for {strike}", partial(reached, step))
        victim = run.holding(f"{_LOGS.get(strike.target, strike.target)}.log")
        if strike.action.endswith("_killed"):
            victim.kill()
        else:
            victim.suspend()
            frozen.append((time.monotonic() + THAWED_S, victim))
    until("every frozen process goes on", lambda: _thaw(frozen), within_s=2 * THAWED_S)


def _thaw(frozen: list[tuple[float, psutil.Process]]) -> bool:
    """Let go on those whose time has come; true when none is left."""
    for due, process in [each for each in frozen if each[0] <= time.monotonic()]:
        frozen.remove((due, process))
        with contextlib.suppress(psutil.NoSuchProcess):  # it has been replaced
            process.resume()
    return not frozen


def _applied(run: LiveRun) -> set[int]:
    log = run.run_dir / "logs" / "trained-rank0.jsonl"
    whole, _, _ = (log.read_bytes() if log.exists() else b"").rpartition(b"\n")
    return {msgspec.json.decode(line).get("version", 0) for line in whole.splitlines()}


def totals(ledger: Ledger) -> dict[str, object]:
    """What has to be the same on real actors and in the simulator, whatever the timing was."""
    return {
        **ledger.counts(),
        "dropped": dict(ledger.totals.dropped),
        "trainer_version": ledger.trainer_version,
        "lineage": ledger.lineage,
        "incarnations": ledger.incarnation,
    }
