"""A tracker that writes one line of text per step."""

from pathlib import Path
from typing import Final

from offbeat.interfaces import Config, MetricRecord, Sink, TrackedRun, Tracker


class LinesConfig(Config):
    """Lines of text, one per step."""

    metric: str = "train/reward"
    """Metric of the lines."""


class LinesSink:
    """Appends a line per step."""

    name = "lines"

    def __init__(self, path: Path, metric: str) -> None:
        """Write nothing yet."""
        self._path, self._metric = path, metric

    def open(self) -> None:
        """Make the directory."""
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: MetricRecord) -> None:
        """Append the metric of a step, if the step has it."""
        if (value := record.metrics.get(self._metric)) is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{record.version} {value:.3f}\n")

    def close(self) -> None:
        """Do nothing: each line is complete."""


class LinesTracker(Tracker[LinesConfig]):
    """Writes ``lines.txt`` into the directory of the run."""

    section = LinesConfig

    def make_sink(self, section: LinesConfig, run: TrackedRun) -> Sink:
        """Return the sink of a run."""
        return LinesSink(run.run_dir / "lines.txt", section.metric)


LINES: Final = LinesTracker()
