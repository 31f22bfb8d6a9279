"""Peak memory of a rank in each phase of a step.

On CUDA it is the memory allocated by torch's allocator; on the CPU the resident memory of the
process, which includes libraries and memory that was freed but not returned. It costs microseconds
per call.
"""

import resource
import sys
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import msgspec

from offbeat.config.sections.trainer import TrainerConfig
from offbeat.messages.training import StepResult
from offbeat.trainers.cpu_time import with_summed_cpu

_METRIC: Final = "memory/peak_{}_bytes"
_PREFIX: Final = _METRIC.partition("{")[0]
RESERVED: Final = "reserved"
"""Name beside those of the phases: what the allocator held, in use or not."""
_PHASES: Final = {
    "prepare_logprobs": "logprobs",
    "begin": "train",
    "microbatch": "train",
    "finish": "finish",
    "publish": "publish",
    "checkpoint": "checkpoint",
}
"""Phase by the trainer rank's name of a call. Other calls are not measured."""


class Meter(Protocol):
    """Measures the peak memory of one section of work at a time."""

    def start(self) -> None:
        """Start a section."""
        ...

    def peak(self) -> int:
        """Return the highest number of bytes since ``start``."""
        ...

    def reserved(self) -> int | None:
        """Return the most bytes since ``start`` that the allocator held, in use or not; None: not known."""
        ...


class PeakMemory:
    """Collects the peak memory per phase of a step, over all sections of the phase."""

    def __init__(self, meter: Meter | None) -> None:
        """Use ``meter``; without one the report is empty."""
        self._meter = meter
        self._peaks = dict[str, int]()
        self._reported: tuple[Hashable, dict[str, float]] = (None, {})

    @contextmanager
    def during(self, call: str) -> Generator[None]:
        """Count the work inside the block to the phase of ``call``, whether it raises or not."""
        phase = _PHASES.get(call)
        if self._meter is None or phase is None:
            yield
            return
        self._meter.start()
        try:
            yield
        finally:
            self._raise_to(phase, self._meter.peak())
            if (reserved := self._meter.reserved()) is not None:
                self._raise_to(RESERVED, reserved)

    def _raise_to(self, name: str, value: int) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), value)

    def report(self, key: Hashable) -> dict[str, float]:
        """Return the metrics of all phases since the last report; the same report for the same key."""
        if self._reported[0] != key:
            named = {_METRIC.format(name): float(peak) for name, peak in self._peaks.items()}
            self._reported, self._peaks = (key, named), {}
        return self._reported[1]


def meter_of(trainer: TrainerConfig) -> Meter | None:
    """Return the memory meter for a rank of this trainer; None for the stub, which has no model."""
    if trainer.backend == "stub":
        return None
    return CudaMeter() if trainer.device.startswith("cuda") else ResidentMeter()


def with_highest(ranks: Sequence[StepResult]) -> StepResult:
    """Return the result of rank 0 with the highest memory peaks and the CPU time of all ranks."""
    first, metrics = ranks[0], dict(ranks[0].metrics)
    for rank in ranks[1:]:
        for name, value in rank.metrics.items():
            if name.startswith(_PREFIX):
                metrics[name] = max(value, metrics.get(name, 0.0))
    return msgspec.structs.replace(first, metrics=with_summed_cpu(metrics, ranks))


class CudaMeter:
    """Measures the bytes of tensors on this process's CUDA device."""

    def start(self) -> None:
        import torch  # noqa: PLC0415 -- whoever imports this module need not load it

        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        import torch  # noqa: PLC0415 -- whoever imports this module need not load it

        return torch.cuda.max_memory_allocated()

    def reserved(self) -> int | None:
        import torch  # noqa: PLC0415 -- whoever imports this module need not load it

        return torch.cuda.max_memory_reserved()


class ResidentMeter:
    """Measures the resident bytes of this process.

    Where the kernel does not let a process reset its high-water mark, or is not Linux, the peak is
    the highest since the process started: then no phase is lower than one before it.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        """Read the kernel's directory of a process, which may be absent."""
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

    def reserved(self) -> int | None:
        """Return None: resident memory has in it what the allocator keeps."""
        return None
