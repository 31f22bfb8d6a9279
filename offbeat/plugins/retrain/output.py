"""Writes the directory of retrained steps, which ``offbeat report`` and pandas read like a run's."""

import contextlib
import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from offbeat.config.yaml_text import to_yaml
from offbeat.messages.training import StepResult
from offbeat.plugins.retrain.comparison import Reproduced, comparable
from offbeat.plugins.retrain.errors import CannotRetrain
from offbeat.plugins.retrain.settings import Settings
from offbeat.runs.directory import CONFIG, JOURNAL, RETRAINED
from offbeat.runs.inputs import TOKENIZER
from offbeat.runs.page_files import METRICS
from offbeat.telemetry.records import MetricRecord, encode_line

_OF_THE_DATA: Final = (
    "train/reward",
    "train/zero_variance_groups",
    "rewards",
    "rollout/",
    "environment/",
    "off_policy/staleness",
)
"""Prefixes of metrics that only the recorded groups decide."""


def row_of(recorded: Mapping[str, float], result: StepResult) -> dict[str, float]:
    """Return the metrics of a retrained step: the trainer's, and those of the recorded groups."""
    of_data = {name: value for name, value in recorded.items() if name.startswith(_OF_THE_DATA)}
    return {**of_data, **comparable(result), "time/train_s": result.compute_s}


class RetrainedFolder:
    """A new directory. Its journal is a copy of the run's: it has the groups of each step."""

    def __init__(self, run_dir: Path, requested: Path | None, settings: Settings) -> None:
        """Create the directory.

        Raises:
            CannotRetrain: The requested directory is in use.
            OSError: It cannot be written.
        """
        self._run_dir, self._settings = run_dir.absolute(), settings
        self.path = _make_directory(self._run_dir, requested)
        shutil.copytree(self._run_dir / JOURNAL, self.path / JOURNAL)
        (self.path / CONFIG).write_text(to_yaml(settings.config, os.environ), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(self._run_dir / TOKENIZER, self.path)
        self._write_facts({})
        self._metrics = (self.path / METRICS).open("xb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.close()

    def write(self, record: MetricRecord) -> None:
        """Append a record to ``metrics.jsonl``."""
        self._metrics.write(encode_line(record))
        self._metrics.flush()

    def finish(
        self, start: int, versions: Sequence[int], reproduced: Reproduced, difference: str
    ) -> None:
        """Write how the steps were compared."""
        compared = dict(reproduced.counts) if self._settings.reproduces else None
        facts = {"start": start, "versions": versions, "equal": compared}
        self._write_facts({**facts, "difference": difference})

    def _write_facts(self, facts: Mapping[str, object]) -> None:
        head = {"run": str(self._run_dir), "overrides": list(self._settings.overrides)}
        encoded = msgspec.json.encode({**head, **facts})
        (self.path / RETRAINED).write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")


def _make_directory(run_dir: Path, requested: Path | None) -> Path:
    """Create the requested directory, or the first free one next to the run."""
    if requested is not None:
        if requested.exists() and (not requested.is_dir() or any(requested.iterdir())):
            raise CannotRetrain(str(requested), "it is in use", "Name another one with --out")
        requested.mkdir(parents=True, exist_ok=True)
        return requested
    wanted = run_dir.with_name(f"{run_dir.name}-retrain")
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    for path in itertools.chain([wanted], numbered):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("numbers end")
