"""Creates the telemetry of a run from its config."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from offbeat.config.base import Config
from offbeat.config.run import RunConfig
from offbeat.doors import find_plugin, plugins_of
from offbeat.run_files.line_file import LineFile
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.records import MetricRecord, encode_line
from offbeat.telemetry.sinks import Sink
from offbeat.telemetry.tracker import TrackedRun, Tracker


class JsonlSink:
    """Appends each record as one whole line: a record is never partial and never duplicated."""

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
    """Create the telemetry of a run, not started: ``metrics.jsonl``, and the trackers that it wants.

    Raises:
        PluginUnusable: The recipe names a tracker that cannot be used.
    """
    sinks: list[Sink] = [JsonlSink(run.run_dir / METRICS_FILE)]
    for _, tracker, section in trackers_of(config):
        if (sink := tracker.make_sink(section, run)) is not None:
            sinks.append(sink)
    return Telemetry(sinks)


def trackers_of(config: RunConfig) -> Iterator[tuple[str, Tracker[Any], Config]]:
    """Yield name, tracker and section of each tracker that a recipe can have, or names.

    Raises:
        PluginUnusable: It names one that cannot be used.
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
    """Change the keys that ``change`` returns for a tracker's section, in the plain recipe ``values``."""
    for name, tracker, section in trackers_of(config):
        sections = values["plugins"] if name in config.plugins else values
        sections[name] = {**sections[name], **change(tracker, section)}


def all_trackers() -> dict[str, Tracker[Any]]:
    """Return the trackers of this package by name."""
    return cast("dict[str, Tracker[Any]]", plugins_of("tracker"))
