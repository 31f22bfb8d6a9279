"""Peak memory of a rank in each phase of a step.

On CUDA this is the memory that torch's allocator allocated. On the CPU it is the resident memory of
the process, including libraries and memory that was freed but not returned. A call costs
microseconds.
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
"""Name of an extra entry next to the phases: memory that the allocator held, in use or not."""
_PHASES: Final = {
    "prepare_logprobs": "logprobs",
    "begin": "train",
    "microbatch": "train",
    "finish": "finish",
    "publish": "publish",
    "checkpoint": "checkpoint",
}
"""Phase by the call names of the trainer rank. Other calls are not measured."""


class Meter(Protocol):
    """Measures the peak memory of one section of work at a time."""

    def start(self) -> None:
        """Start a section."""
        ...

    def peak(self) -> int:
        """Return the highest number of bytes since ``start``."""
        ...

    def read_reserved(self) -> int | None:
        """Return the most bytes that the allocator held since ``start``, in use or not.

        Return None if that is not known.
        """
        ...


class PeakMemory:
    """Collects the peak memory per phase of a step, over all sections of the phase."""

    def __init__(self, meter: Meter | None) -> None:
        """Create the collector. Without a ``meter``, the report is empty."""
        self._meter = meter
        self._peaks = dict[str, int]()
        self._reported: tuple[Hashable, dict[str, float]] = (None, {})

    @contextmanager
    def during(self, call: str) -> Generator[None]:
        """Count the work inside the block to the phase of ``call``, even if it raises."""
        phase = _PHASES.get(call)
        if self._meter is None or phase is None:
            yield
            return
        self._meter.start()
        try:
            yield
        finally:
            self._raise_to(phase, self._meter.peak())
            if (reserved := self._meter.read_reserved()) is not None:
                self._raise_to(RESERVED, reserved)

    def _raise_to(self, name: str, value: int) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), value)

    def report(self, key: Hashable) -> dict[str, float]:
        """Return metrics of all phases since the last report. The same key gets the same report."""
        if self._reported[0] != key:
            named = {_METRIC.format(name): float(peak) for name, peak in self._peaks.items()}
            self._reported, self._peaks = (key, named), {}
        return self._reported[1]


def make_meter(trainer: TrainerConfig) -> Meter | None:
    """Return the memory meter for a rank of this trainer, or None for the stub, without a model."""
    if trainer.backend == "stub":
        return None
    return CudaMeter() if trainer.device.startswith("cuda") else ResidentMeter()


def with_highest(ranks: Sequence[StepResult]) -> StepResult:
    """Return rank 0's result with the highest memory peaks and summed CPU time of all ranks."""
    first, metrics = ranks[0], dict(ranks[0].metrics)
    for rank in ranks[1:]:
        for name, value in rank.metrics.items():
            if name.startswith(_PREFIX):
                metrics[name] = max(value, metrics.get(name, 0.0))
    return msgspec.structs.replace(first, metrics=with_summed_cpu(metrics, ranks))


class CudaMeter:
    """Measures bytes of tensors on this process's CUDA device."""

    def start(self) -> None:
        import torch  # noqa: PLC0415 -- importers of this module need not load it

        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        import torch  # noqa: PLC0415 -- importers of this module need not load it

        return torch.cuda.max_memory_allocated()

    def read_reserved(self) -> int | None:
        import torch  # noqa: PLC0415 -- importers of this module need not load it

        return torch.cuda.max_memory_reserved()


class ResidentMeter:
    """Measures the resident bytes of this process.

    Outside Linux, or if the kernel forbids resetting the high-water mark, the peak counts from the
    start of the process. Then no phase shows a lower value than an earlier phase.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        """Read ``process``, the kernel's directory of a process. It may be missing."""
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

    def read_reserved(self) -> int | None:
        """Return None, because resident memory includes the memory that the allocator keeps."""
        return None
