"""Sinks with fault switches, and pauses that no test waits for."""

import threading

from offbeat.telemetry.records import MetricRecord


class FakeSink:
    """Keeps what it was written; raises or blocks as its switches say."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.records = list[MetricRecord]()
        self.raises: list[Exception] = []  # one for each of the next writes
        self.open_raises: list[Exception] = []
        self.entered = threading.Event()  # a write has begun
        self._wrote = threading.Condition()
        self.gate = threading.Event()  # writes wait for it
        self.gate.set()
        self.closed = False

    def open(self) -> None:
        if self.open_raises:
            raise self.open_raises.pop(0)

    def write(self, record: MetricRecord) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        if self.raises:
            raise self.raises.pop(0)
        with self._wrote:
            self.records.append(record)
            self._wrote.notify_all()

    def close(self) -> None:
        self.closed = True

    def wait_for(self, count: int) -> None:
        """Return once so many records were written."""
        with self._wrote:
            assert self._wrote.wait_for(lambda: len(self.records) >= count, 30)

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]


class CountedPauses:
    """Returns at once, and remembers for how long it should have waited."""

    def __init__(self) -> None:
        self.asked_s = list[float]()

    def __call__(self, finishing: threading.Event, pause_s: float) -> None:
        self.asked_s.append(pause_s)


class HeldPause:
    """A pause that lasts until the test, or the end of the run, ends it."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def __call__(self, finishing: threading.Event, pause_s: float) -> None:
        self.begun.set()
        assert finishing.wait(30)


class FailsBySchedule(FakeSink):
    """Raises at the writes where the schedule says so; behind its end, never."""

    def __init__(self, failures: list[bool]) -> None:
        super().__init__()
        self._failures = list(failures)

    def write(self, record: MetricRecord) -> None:
        if self._failures and self._failures.pop(0):
            raise ConnectionError("scheduled")
        super().write(record)
