"""Creates the telemetry of a run from its config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.plugins.tensorboard.section import TensorBoardConfig
from offbeat.plugins.tensorboard.sink import TensorBoardSink
from offbeat.plugins.wandb.section import WandbConfig
from offbeat.plugins.wandb.sink import WandbSink, resolved_mode
from offbeat.run_files.line_file import LineFile
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.records import MetricRecord, encode_line
from offbeat.telemetry.sinks import Sink


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
TENSORBOARD_FOLDER: Final = "tensorboard"


def run_telemetry(
    wandb: WandbConfig,
    *,
    tensorboard: TensorBoardConfig | None = None,
    samples_per_step: int = 1,
    run_dir: Path,
    run_id: str,
    run_name: str,
    recipe: Mapping[str, Any],
) -> Telemetry:
    """Create the telemetry of a run: ``metrics.jsonl``, unless disabled W&B, on request TensorBoard.

    Not started yet.

    ``recipe`` is shown in W&B: pass it redacted.
    """
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS_FILE)]
    mode = resolved_mode(wandb)
    if mode != "disabled":
        sinks.append(
            WandbSink(
                wandb, mode=mode, run_id=run_id, run_name=run_name, run_dir=run_dir, recipe=recipe
            )
        )
    if tensorboard is not None and tensorboard.enabled:
        per_version = samples_per_step if tensorboard.x_axis == "samples" else 1
        sinks.append(TensorBoardSink(run_dir / TENSORBOARD_FOLDER, per_version=per_version))
    return Telemetry(sinks)
