"""Interface between a sink and the hub."""

from typing import Protocol

from offbeat.messages.failures import FixableError
from offbeat.telemetry.records import MetricRecord


class Sink(Protocol):
    """Destination of records. All calls come from the sink's own thread, one at a time.

    A call may block and may raise. A call that raised is repeated after a pause, so a ``write``
    that raises must not leave a partial record that a second one would duplicate.
    """

    @property
    def name(self) -> str: ...

    def open(self) -> None:
        """Prepare the sink. Called before every write.

        Raises:
            SinkUnusable: The sink can never work in this process; it is not tried again.
        """
        ...

    def write(self, record: MetricRecord) -> None:
        """Write the next record. Records come in the order of the steps, each once."""
        ...

    def close(self) -> None:
        """Flush and close. Called last, also after an ``open`` that raised."""
        ...


class SinkUnusable(FixableError):
    """A sink that can never work in this process: trying again would not help."""

    form = "nothing is written to {}: {}. {}"


def not_installed(sink: str, error: ImportError, instead: str = "") -> SinkUnusable:
    """Return the error of a sink whose package cannot be imported."""
    fix = f"Install it with: pip install 'offbeat[{sink}]'{instead}"
    return SinkUnusable(sink, f"it cannot be imported ({error})", fix)
