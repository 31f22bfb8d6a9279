"""Interface of a tracker: a plug-in that receives the metrics of each step.

``metrics.jsonl`` is the complete record. Trackers receive the same records. The recipe's models
import this module, so it must not import these models.

Also defines the interface between a sink and the hub.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from offbeat.config.base import Config
from offbeat.messages.failures import FixableError
from offbeat.messages.finding import Finding
from offbeat.telemetry.records import MetricRecord


class Sink(Protocol):
    """Destination of records. All calls come from the sink's thread, one at a time.

    A call may block and may raise. A call that raised is repeated after a pause. So a ``write``
    that raises must not leave a partial record that the repeated call would duplicate.
    """

    @property
    def name(self) -> str: ...

    def open(self) -> None:
        """Prepare the sink. Called before every write.

        Raises:
            SinkUnusable: The sink can never work in this process. It is not tried again.
        """
        ...

    def write(self, record: MetricRecord) -> None:
        """Write the next record. Records arrive in the order of the steps, each once."""
        ...

    def close(self) -> None:
        """Flush and close. This is the last call, even if ``open`` has raised."""
        ...


@runtime_checkable
class SampleSink(Sink, Protocol):
    """A sink that may also want the samples of each step, in ``record.samples``."""

    @property
    def wants_samples(self) -> bool: ...


class SinkUnusable(FixableError):
    """A sink can never work in this process, so a retry would not help.

    Fix: install or configure the tracker, or turn it off; metrics stay in ``metrics.jsonl``.
    """

    form = "nothing is written to {}: {}. {}"


def not_installed(sink: str, error: ImportError, instead: str = "") -> SinkUnusable:
    """Return the error of a sink if its package cannot be imported."""
    fix = f"Install it with: pip install 'offbeat[{sink}]'{instead}"
    return SinkUnusable(sink, f"it cannot be imported ({error})", fix)


S = TypeVar("S", bound=Config)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Facts about a run that trackers show."""

    run_id: str
    name: str
    run_dir: Path
    recipe: Mapping[str, Any]
    """The recipe without secrets, so a tracker may show it."""
    samples_per_step: int = 1
    working_dir: Path | None = None
    """Directory of the user's code, or None if unknown."""


@dataclass(frozen=True, slots=True)
class ExportPlace:
    """A sink for an export, the place it writes to, and the command that shows the result."""

    sink: Sink
    where: str
    look: str


class Tracker(ABC, Generic[S]):
    """Receives the metrics of each step; each method gets the tracker's section of the recipe."""

    section: type[S]
    """Model of the section that a recipe has under the tracker's name."""

    variable_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of environment variables that the tracker reads. Processes of a run receive them."""

    can_count_samples: ClassVar[bool] = False
    """Whether the tracker's x axis can count samples (``offbeat export --x-axis samples``)."""

    @abstractmethod
    def make_sink(self, section: S, run: TrackedRun) -> Sink | None:
        """Return the sink of a run, not opened, or None if the recipe wants none."""

    def check(self, section: S, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Yield findings about the recipe and this machine, for ``offbeat check``."""
        del section, environ
        yield from ()

    def for_dry_run(self, section: S) -> Mapping[str, object]:
        """Return the keys that a dry run changes, for example so that no connection is made."""
        del section
        return {}

    def for_evaluation(self, section: S) -> Mapping[str, object]:
        """Return the keys that ``offbeat eval`` changes, because it trains no steps."""
        del section
        return {}

    def export_place(self, run: TrackedRun, output: str | None) -> ExportPlace | None:
        """Return where ``offbeat export`` writes an ended run's metrics, or None if it cannot.

        ``output`` is the place that the user named.

        Raises:
            FixableError: The place cannot be used.
        """
        del run, output
        return None
