"""Defines the interface of a sink to the hub."""

from typing import Protocol

from offbeat.messages.failures import OffbeatError
from offbeat.telemetry.records import MetricRecord


class Sink(Protocol):
    """A place where records go. Every call comes from the sink's own thread, one at a time.

    A call may block and may raise. One that raised is made again after a pause, so a ``write`` that
    raises must leave nothing behind that a second one would double.
    """

    @property
    def name(self) -> str: ...

    def open(self) -> None:
        """Get ready. Comes before every write.

        Raises:
            SinkUnusable: It can never work in this process; it is not tried again.
        """
        ...

    def write(self, record: MetricRecord) -> None:
        """Take the next record. Records come in the order of the steps, each once."""
        ...

    def close(self) -> None:
        """Bring out what was written and let go. Comes last, also after an ``open`` that raised."""
        ...


class SinkUnusable(OffbeatError):
    """A sink that can never work in this process: trying again would not help."""

    def __init__(self, sink: str, reason: str, fix: str) -> None:
        super().__init__(sink, reason, fix)
        self.sink, self.reason, self.fix = sink, reason, fix

    def __str__(self) -> str:
        return f"nothing is written to {self.sink}: {self.reason}. {self.fix}"
