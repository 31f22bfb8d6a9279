"""CPU seconds of a trainer rank's process. Unlike wall time, they do not grow with machine load."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

from offbeat.messages.training import StepResult

_METRIC: Final = "cpu/trainer_s"


class CpuTime:
    """Measures all CPU seconds of this process between two steps."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        """``clock`` returns the CPU seconds of the process."""
        self._clock = clock
        self._since_s: float | None = None  # None: no step yet; the start belongs to no step
        self._reported: tuple[Hashable, dict[str, float]] = (None, {})

    def report(self, key: Hashable) -> dict[str, float]:
        """Return the seconds since the last report, or the same metric again for the same key."""
        if self._reported[0] != key:
            now_s, since_s = self._clock(), self._since_s
            named = {} if since_s is None else {_METRIC: now_s - since_s}
            self._reported, self._since_s = (key, named), now_s
        return self._reported[1]


def with_summed_cpu(metrics: Mapping[str, float], ranks: Sequence[StepResult]) -> dict[str, float]:
    """Return ``metrics`` with the CPU seconds of all ranks, or without them if a rank has none."""
    seconds = [rank.metrics[_METRIC] for rank in ranks if _METRIC in rank.metrics]
    others = {name: value for name, value in metrics.items() if name != _METRIC}
    return others | ({_METRIC: sum(seconds)} if len(seconds) == len(ranks) else {})
