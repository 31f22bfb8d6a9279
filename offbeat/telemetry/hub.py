"""Entry point for measurements: passes each record to the spool of every sink.

Creates the telemetry of a run from its config.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import structlog

from offbeat.config.base import Config
from offbeat.config.run import RunConfig
from offbeat.doors import find_plugin, find_plugins
from offbeat.run_files.line_file import LineFile
from offbeat.telemetry.metric_table import METRICS, declared_name, undeclared
from offbeat.telemetry.records import MetricRecord, encode_line
from offbeat.telemetry.spool import Pause, SinkCounts, SinkWriter
from offbeat.telemetry.step_samples import StepSamples
from offbeat.telemetry.tracker import SampleSink, Sink, TrackedRun, Tracker

log = structlog.stdlib.get_logger()

SPOOLED_RECORDS = 10_000
"""Records that may wait for a sink, about 40 MB. With more, the sink loses the oldest record."""


class Telemetry:
    """Receives the metrics of each step; one thread per sink writes them.

    The sinks are independent: if a sink raises or blocks, records of the other sinks are neither
    delayed nor lost. The first sink writes ``metrics.jsonl``. It receives every record first, and
    its
    record is complete.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        capacity: int = SPOOLED_RECORDS,
        pause: Pause = threading.Event.wait,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._writers = [SinkWriter(sink, capacity=capacity, pause=pause) for sink in sinks]
        self._now = now
        self._wants_samples = any(
            isinstance(sink, SampleSink) and sink.wants_samples for sink in sinks
        )
        self._reported = set[str]()
        self._closed = False

    def start(self) -> None:
        """Start the writers. They also write records emitted before the start."""
        for writer in self._writers:
            writer.start()

    def emit(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, float],
        samples: Callable[[], StepSamples] | None = None,
    ) -> None:
        """Emit the metrics of a step. Never blocks, never raises. Ignored after ``close``.

        An undeclared metric is written, and logged once as an error. A value that is not a number
        is left out, and logged once. ``samples`` is called only if a sink wants samples.
        """
        if self._closed:
            return
        made = samples() if samples is not None and self._wants_samples else None
        record = MetricRecord(step, version, self._now(), dict(self._numbers(metrics)), made)
        for writer in self._writers:
            writer.put(record)
        for name in metrics.keys() - METRICS.keys() - self._reported:
            if declared_name(name) not in METRICS:
                self._reported.add(name)
                log.error("metric.undeclared", detail=str(undeclared(name)))

    def tallies(self) -> tuple[SinkCounts, ...]:
        """Return the record counts of each sink so far."""
        return tuple(writer.tally for writer in self._writers)

    def close(self, deadline_s: float) -> tuple[SinkCounts, ...]:
        """Write all spooled records and close the sinks; return within the deadline.

        A sink that is not done at the deadline is abandoned with its pending records, and logged.
        Blocks: call it from a thread, or outside of an event loop. A second call does nothing.
        """
        if self._closed:
            return self.tallies()
        self._closed = True
        ends_at = time.monotonic() + deadline_s
        for writer in self._writers:
            writer.finish()
        for writer in self._writers:
            done = writer.join(max(0.0, ends_at - time.monotonic()))
            self._report_losses(writer.tally, done=done)
        return self.tallies()

    def _numbers(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Yield the values that every sink can write."""
        for name, value in metrics.items():
            try:
                yield name, float(value)
            except (TypeError, ValueError, OverflowError) as error:
                if name not in self._reported:
                    self._reported.add(name)
                    log.error("metric.not_a_number", metric=name, error=repr(error))  # noqa: TRY400

    def _report_losses(self, tally: SinkCounts, *, done: bool) -> None:
        if tally.pending or tally.dropped or not done:
            log.warning(
                "sink.incomplete",
                sink=tally.sink,
                written=tally.written,
                dropped=tally.dropped,
                pending=tally.pending,
                failures=tally.failures,
                closed=done,
            )


class JsonlSink:
    """Appends each record as one complete line. A record is never partial and never duplicated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LineFile | None = None

    @property
    def name(self) -> str:
        return self._path.name

    def open(self) -> None:
        self._file = LineFile(self._path)

    def write(self, record: MetricRecord) -> None:
        if self._file is None:
            raise ValueError(f"{self._path} is not open")
        self._file.append(encode_line(record))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


METRICS_FILE: Final = "metrics.jsonl"


def run_telemetry(config: RunConfig, run: TrackedRun) -> Telemetry:
    """Create, but do not start, a run's telemetry: ``metrics.jsonl`` and the recipe's trackers.

    Raises:
        PluginUnusable: The recipe names a tracker that cannot be used.
    """
    sinks: list[Sink] = [JsonlSink(run.run_dir / METRICS_FILE)]
    for _, tracker, section in trackers_of(config):
        if (sink := tracker.make_sink(section, run)) is not None:
            sinks.append(sink)
    return Telemetry(sinks)


def trackers_of(config: RunConfig) -> Iterator[tuple[str, Tracker[Any], Config]]:
    """Yield name, object and section of each tracker that a recipe names or could configure.

    Raises:
        PluginUnusable: The recipe names a tracker that cannot be used.
    """
    for name, tracker in all_trackers().items():
        yield name, tracker, getattr(config, name)
    for name, options in config.plugins.items():
        named = cast("Tracker[Any]", find_plugin("tracker", name))
        yield name, named, named.section.model_validate(options)


def change_trackers(
    values: dict[str, Any],
    config: RunConfig,
    change: Callable[[Tracker[Any], Config], Mapping[str, object]],
) -> None:
    """Set in the plain recipe ``values`` the keys that ``change`` returns for each tracker."""
    for name, tracker, section in trackers_of(config):
        sections = values["plugins"] if name in config.plugins else values
        sections[name] = {**sections[name], **change(tracker, section)}


def all_trackers() -> dict[str, Tracker[Any]]:
    """Return the trackers of this package by name."""
    return cast("dict[str, Tracker[Any]]", find_plugins("tracker"))
