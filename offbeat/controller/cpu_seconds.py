"""CPU seconds that the processes of a run took in a step: unlike wall time, no load lengthens them."""

from collections.abc import Callable, Iterable
from typing import Final

from offbeat.controller.engine_record import EngineRecord

_MAX_PROCESSES: Final = 8192
"""Worker processes that are remembered: more than live at once, as each restart is another one."""


class CpuSeconds:
    """CPU seconds of controller, workers and engines since the last step. Pure but for the clock.

    Every process reports a sum since its own start, so a report that is lost, late or repeated
    changes no total.
    """

    def __init__(self, own: Callable[[], float]) -> None:
        """``own`` returns the CPU seconds of this process since its start."""
        self._own = own
        self._of_workers = dict[str, float]()  # by process, the one that reported longest ago first
        self._workers_s = 0.0  # of all processes
        self._before: dict[str, float] | None = None

    @property
    def processes(self) -> int:
        """Return the number of processes of workers that are remembered."""
        return len(self._of_workers)

    def worker_reported(self, process: str, cpu_s: float) -> None:
        """Take the CPU seconds of a worker's process; a report may be late."""
        before = self._of_workers.pop(process, 0.0)
        self._of_workers[process] = max(cpu_s, before)
        self._workers_s += max(0.0, cpu_s - before)
        if len(self._of_workers) > _MAX_PROCESSES:
            del self._of_workers[next(iter(self._of_workers))]

    def lap(self, engines: Iterable[EngineRecord]) -> dict[str, float]:
        """Return metrics of the seconds since the last call; of the first one, nothing.

        Before the first step the processes have started, which is no part of a step.
        """
        totals = {
            "cpu/controller_s": self._own(),
            "cpu/workers_s": self._workers_s,
            "cpu/engines_s": sum(engine.cpu_s for engine in engines),
        }
        before, self._before = self._before, totals
        if before is None:
            return {}
        return {name: max(0.0, total - before[name]) for name, total in totals.items()}
