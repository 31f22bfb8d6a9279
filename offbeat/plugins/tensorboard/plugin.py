"""TensorBoard as a tracker: event files in the run's directory."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from offbeat.config.base import Config
from offbeat.doors import is_installed
from offbeat.messages.failures import FixableError
from offbeat.messages.finding import Finding, error, ok
from offbeat.plugins.tensorboard.sink import TensorBoardSink
from offbeat.telemetry.tracker import ExportPlace, Sink, TrackedRun, Tracker


class TensorBoardConfig(Config):
    """TensorBoard, in addition to ``metrics.jsonl``: writes event files, and starts no server."""

    enabled: bool = False
    """Write `tensorboard/` in the run directory during the run (extra `tensorboard`). `offbeat
    export` writes the same afterwards."""

    x_axis: Literal["steps", "samples"] = "steps"
    """Unit of the step axis. samples (`groups_per_step` times `samples_per_group` per step) aligns
    runs with different batch sizes."""


_FOLDER: Final = "tensorboard"


class EventsThere(FixableError):
    """A directory already has event files, which TensorBoard would mix with the new ones.

    Fix: use a different directory, or remove the files.
    """


class TensorBoardTracker(Tracker[TensorBoardConfig]):
    """Writes event files, on request."""

    section = TensorBoardConfig
    can_count_samples = True

    def make_sink(self, section: TensorBoardConfig, run: TrackedRun) -> Sink | None:
        """Return a sink in ``tensorboard/`` of the run's directory, if the recipe enables it."""
        if not section.enabled:
            return None
        per_version = run.samples_per_step if section.x_axis == "samples" else 1
        return TensorBoardSink(run.run_dir / _FOLDER, per_version=per_version)

    def check(self, section: TensorBoardConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Check that TensorBoard's package is installed, if the recipe enables it."""
        del environ
        if not section.enabled:
            return
        if not is_installed("tensorboard"):
            fix = (
                "Install it with pip install 'offbeat[tensorboard]', or set "
                "tensorboard.enabled=false."
            )
            yield error("tensorboard", "is not installed; tensorboard.enabled=true", fix)
        else:
            yield ok("tensorboard", f"x axis in {section.x_axis}")

    def export_place(self, run: TrackedRun, output: str | None) -> ExportPlace:
        """Return a directory for event files: the run's, or one with the run's name in ``output``.

        Raises:
            EventsThere: It already has event files.
        """
        folder = Path(output) / run.run_dir.resolve().name if output else run.run_dir / _FOLDER
        if folder.is_dir() and any(folder.glob("events.out.tfevents.*")):
            fix = "Name another directory with --output, or remove them"
            raise EventsThere(str(folder), "it has files of events already", fix)
        sink = TensorBoardSink(folder, per_version=run.samples_per_step)
        return ExportPlace(sink, str(folder), f"tensorboard --logdir {output or run.run_dir}")


TRACKER: Final = TensorBoardTracker()
