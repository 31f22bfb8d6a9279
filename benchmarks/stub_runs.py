"""The real command on stub actors, in a process of its own, and the CPU time of each of its processes."""

import contextlib
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from offbeat.telemetry.records import MetricRecord, read_metrics
from offbeat.telemetry.summary import Summary

_LOOK_S: Final = 0.2
_ROOT: Final = Path(__file__).parents[1]
_RECIPE: Final = """\
name: stub
steps: 100
model: {{path: {model}}}
environment: {{name: stub}}
generator: {{backend: stub}}
trainer: {{backend: stub}}
checkpoint: {{interval: 0, final: false}}
wandb: {{mode: disabled}}
"""


@dataclass(frozen=True, slots=True)
class Look:
    """CPU seconds of the processes of a run until now, by what they are."""

    at_s: float  # Unix time
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class StubRun:
    """Files and observations of one run."""

    steps: list[MetricRecord]
    summary: Summary
    looks: list[Look]

    def between(self, first: int, last: int) -> tuple[Look, Look]:
        """The first look after the end of step ``first``, and the last one before that of ``last``."""
        since, until = self.steps[first - 1].time_s, self.steps[last - 1].time_s
        inside = [look for look in self.looks if since <= look.at_s <= until]
        return inside[0], inside[-1]


def run(scratch: Path, overrides: Sequence[str]) -> StubRun:
    """Start the command, look at its processes until it ends, and read what it wrote.

    Raises:
        CalledProcessError: It failed.
    """
    recipe, run_dir = scratch / "stub.yaml", scratch / "run"
    recipe.write_text(_RECIPE.format(model=_ROOT / "models" / "tiny-addition"))
    command = [sys.executable, "-m", "offbeat", "train", str(recipe), *overrides]
    command += ["--run-dir", str(run_dir)]
    looks = list[Look]()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=scratch) as driver:
        of_driver = psutil.Process(driver.pid)
        while driver.poll() is None:
            looks.append(_look(of_driver))
            time.sleep(_LOOK_S)
    if driver.returncode:
        raise subprocess.CalledProcessError(driver.returncode, command)
    return StubRun(
        read_metrics(run_dir / "metrics.jsonl"),
        Summary.from_json((run_dir / "summary.json").read_bytes()),
        looks,
    )


def _look(driver: psutil.Process) -> Look:
    at_s, cpu_s = time.time(), defaultdict[str, float](float)
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended between two looks
        for process in (driver, *driver.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu_s[_kind(process, driver)] += times.user + times.system
    return Look(at_s, cpu_s)


def _kind(process: psutil.Process, driver: psutil.Process) -> str:
    """``ControllerActor`` of the title ``ray::ControllerActor.run``.

    All that is Ray's own is one kind.
    """
    if process == driver:
        return "command"
    title = " ".join(process.cmdline())
    if not title.startswith("ray::") or "Agent" in title:
        return "Ray itself"
    return title.removeprefix("ray::").split(".")[0].split()[0]
