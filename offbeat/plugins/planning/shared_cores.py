"""Cores that the processes of a virtual run share equally."""

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LEAST: Final = 1e-9  # of work; a smaller rest counts as done


@dataclass(frozen=True, slots=True)
class CoreUse:
    """CPU seconds of a run's processes, and the cores that they share. Times are of one step."""

    cores: float
    others: float  # mean number of outside processes that compete for the cores
    slowdown: float  # wall seconds per CPU second of a computing process, in the measured run
    step_cpu_s: float  # of trainer and controller, one after the other
    group_cpu_s: float  # of the worker, for a group
    engine_duty: float  # share of the time with groups in which an engine needs a core

    def waiting_s(self, wall_s: float, cpu_s: float) -> float:
        """Return the measured time without the time in which the process needed a core."""
        return max(0.0, wall_s - self.slowdown * cpu_s)

    def decoding_s(self, wall_s: float, pace: float) -> float:
        """Scale a measured decode time to this pace of the cores."""
        return wall_s * (1 - self.engine_duty + self.engine_duty / (self.slowdown * pace))


@dataclass(eq=False)
class Job:
    """Work in parts that share a pace with all other jobs' parts."""

    left: int  # parts that have not ended
    done: "asyncio.Future[None]"


class SharedPace:
    """Parts of jobs that all progress at one pace, which depends on their number.

    ``progress`` is the work of an imaginary part that has run since the start. A part ends once
    ``progress`` has grown by the part's work. So one timer serves all parts.
    """

    def __init__(self) -> None:
        self._progress, self._at_s, self._count = 0.0, 0.0, 0
        self._ends = list[tuple[float, int, Job]]()
        self._timer: asyncio.TimerHandle | None = None

    def _unit_s(self) -> float:
        """Return the seconds that each part needs for a unit of work, or infinity if all wait."""
        raise NotImplementedError

    def _change(self, change: Callable[[], object]) -> None:
        """Update all parts to now, change the set of parts, and restart the timer."""
        raise NotImplementedError

    async def _run(self, parts: int, start: Callable[[Job], object]) -> None:
        """Start a job and wait for its end. Remove it if the caller is cancelled."""
        job = Job(parts, asyncio.get_running_loop().create_future())
        self._change(lambda: start(job))
        try:
            await job.done
        except asyncio.CancelledError:
            self._change(lambda: self._remove(job))
            raise

    def _push(self, work: float, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._ends, (self._progress + work, self._count, job))

    def _remove(self, job: Job) -> None:
        self._ends = [entry for entry in self._ends if entry[2] is not job]
        heapq.heapify(self._ends)

    def _settle(self) -> None:
        """Update the parts to now, at the previous pace."""
        now_s = asyncio.get_running_loop().time()
        self._progress += (now_s - self._at_s) / self._unit_s()
        self._at_s = now_s

    def _end_parts(self) -> None:
        while self._ends and self._ends[0][0] <= self._progress + LEAST:
            _, _, job = heapq.heappop(self._ends)
            job.left -= 1
            if not job.left and not job.done.done():
                job.done.set_result(None)

    def _resume(self) -> None:
        """Set the timer by the new pace."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and (unit_s := self._unit_s()) < math.inf:
            left_s = max(0.0, self._ends[0][0] - self._progress) * unit_s
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(left_s, self._change, lambda: None)


class SharedCores(SharedPace):
    """Processor sharing: a computing process has one core, or an equal share of all cores.

    Without cores (``use`` is None) nothing is slowed down.
    """

    def __init__(self, use: CoreUse | None) -> None:
        super().__init__()
        self._cores = math.inf if use is None else use.cores
        self._others = 0.0 if use is None else use.others
        self._computing = dict[object, float]()  # share of a core, by process that comes and goes
        self._on_change = list[tuple[Callable[[], None], Callable[[], None]]]()

    @property
    def pace(self) -> float:
        """Return the CPU seconds per second of each computing process."""
        computing = sum(self._computing.values()) + len(self._ends) + self._others
        return 1.0 if computing <= self._cores else self._cores / computing

    def notify(self, settle: Callable[[], None], resume: Callable[[], None]) -> None:
        """Call ``settle`` before each change of the pace, and ``resume`` after it."""
        self._on_change.append((settle, resume))

    def computes(self, process: object, duty: float) -> None:
        """Set a process's use of a core, 0 to 1. The process itself reads the pace."""
        if self._computing.get(process, 0.0) != duty and self._cores < math.inf:
            self._change(lambda: self._computing.update({process: duty}))

    async def run(self, cpu_s: float) -> None:
        """Compute from now on, and return after ``cpu_s`` CPU seconds."""
        if self._cores == math.inf or cpu_s <= 0:
            await asyncio.sleep(max(0.0, cpu_s))
            return
        await self._run(1, lambda job: self._push(cpu_s, job))

    def _unit_s(self) -> float:
        return 1 / self.pace

    def _change(self, change: Callable[[], object]) -> None:
        self._settle()
        for settle, _ in self._on_change:
            settle()
        change()
        self._end_parts()
        self._resume()
        for _, resume in self._on_change:
            resume()
