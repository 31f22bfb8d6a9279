"""The most memory a rank has held in each phase of a step.

On CUDA it is what torch's allocator had given out; on the CPU what of the process was resident, which
counts everything in it: libraries, and memory that was freed and kept. Costs microseconds a call.
"""

import resource
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import msgspec

from offbeat.config.training import TrainerConfig
from offbeat.messages.training import StepResult

_METRIC: Final = "memory/peak_{}_bytes"
_PREFIX: Final = _METRIC.partition("{")[0]
_PHASES: Final = {
    "prepare_logprobs": "logprobs",
    "begin": "train",
    "microbatch": "train",
    "finish": "finish",
    "publish": "publish",
    "checkpoint": "checkpoint",
}
"""By what a trainer actor calls its work; what is not here is not measured."""


class Meter(Protocol):
    """Measures one stretch of work at a time."""

    def start(self) -> None: ...

    def peak(self) -> int:
        """Bytes at the highest, since ``start``."""
        ...


class PeakMemory:
    """Collects the phases of a step; a phase may come in pieces, of which the highest counts."""

    def __init__(self, meter: Meter | None) -> None:
        """Without a meter there is nothing to report."""
        self._meter = meter
        self._peaks = dict[str, int]()
        self._reported: tuple[Hashable, dict[str, float]] = (None, {})

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """What is done inside belongs to the phase of this call, whether it raises or not."""
        phase = _PHASES.get(call)
        if self._meter is None or phase is None:
            yield
            return
        self._meter.start()
        try:
            yield
        finally:
            self._peaks[phase] = max(self._peaks.get(phase, 0), self._meter.peak())

    def report(self, key: Hashable) -> dict[str, float]:
        """Metrics of all phases since the report of another key; of the same one, that report again."""
        if self._reported[0] != key:
            named = {_METRIC.format(name): float(peak) for name, peak in self._peaks.items()}
            self._reported, self._peaks = (key, named), {}
        return self._reported[1]


def meter_of(trainer: TrainerConfig) -> Meter | None:
    """What measures a rank of this trainer. The stub holds nothing worth it."""
    if trainer.backend == "stub":
        return None
    return CudaMeter() if trainer.device.startswith("cuda") else ResidentMeter()


def with_highest(ranks: Sequence[StepResult]) -> StepResult:
    """The first rank's result, with the highest peaks of any rank."""
    first, metrics = ranks[0], dict(ranks[0].metrics)
    for rank in ranks[1:]:
        for name, value in rank.metrics.items():
            if name.startswith(_PREFIX):
                metrics[name] = max(value, metrics.get(name, 0.0))
    return msgspec.structs.replace(first, metrics=metrics)


class CudaMeter:
    """Bytes of tensors on this process's CUDA device."""

    def start(self) -> None:
        import torch  # noqa: PLC0415 -- whoever imports this module need not load it

        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        import torch  # noqa: PLC0415 -- whoever imports this module need not load it

        return torch.cuda.max_memory_allocated()


class ResidentMeter:
    """Bytes of this process in memory.

    Where the kernel does not let a process set its own high-water mark back, or is not Linux, it is
    the highest since the process began: then no phase is lower than one before it.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        """``process``: the kernel's directory about it; it need not be there."""
        self._mark, self._status = process / "clear_refs", process / "status"
        self._can_start = self._status.exists() and self._mark.exists()

    def start(self) -> None:
        if self._can_start:
            try:
                self._mark.write_text("5")  # sets VmHWM to VmRSS
            except OSError:
                self._can_start = False

    def peak(self) -> int:
        if self._status.exists():
            for line in self._status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024
