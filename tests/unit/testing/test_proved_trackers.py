"""The proof of a tracker accepts one that writes each record, and no other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.base import Config
from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.tracker import TrackedRun, Tracker
from offbeat.testing import TrackerRefused, prove_tracker


class BoardConfig(Config):
    """A board in a file."""

    file: str = "board.txt"
    on: bool = True


class BoardSink:
    name = "board"

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        self.path.touch()

    def write(self, record: MetricRecord) -> None:
        with self.path.open("a") as file:
            file.write(f"{record.version} {len(record.metrics)}\n")

    def close(self) -> None: ...


class Board(Tracker[BoardConfig]):
    section = BoardConfig

    def make_sink(self, section: BoardConfig, run: TrackedRun) -> BoardSink | None:
        return BoardSink(run.run_dir / section.file) if section.on else None


class OfRewards(Board):
    def make_sink(self, section: BoardConfig, run: TrackedRun) -> BoardSink:
        class Sink(BoardSink):
            def write(self, record: MetricRecord) -> None:
                float(record.metrics["train/reward"])

        return Sink(run.run_dir / section.file)


class Adding(Board):
    def make_sink(self, section: BoardConfig, run: TrackedRun) -> BoardSink:
        class Sink(BoardSink):
            def write(self, record: MetricRecord) -> None:
                record.metrics["board"] = 1.0

        return Sink(run.run_dir / section.file)


class WrongDryRun(Board):
    def for_dry_run(self, section: BoardConfig) -> Mapping[str, object]:
        return {"mode": "offline"}


def test_a_tracker_gets_the_records_of_a_run_and_of_a_resumed_one(tmp_path: Path) -> None:
    prove_tracker(Board(), {}, tmp_path)
    assert (tmp_path / "board.txt").read_text() == "1 2\n2 2\n2 1\n3 0\n" * 2


@pytest.mark.parametrize(
    ("tracker", "keys", "told"),
    [
        (Board(), {"place": "x"}, "its section refuses its keys"),
        (Board(), {"on": False}, "make_sink returns None"),
        (OfRewards(), {}, "write raised KeyError"),
        (Adding(), {}, "write changed the metrics of step 1"),
        (WrongDryRun(), {}, "its section refuses the keys of for_dry_run"),
    ],
)
def test_a_tracker_is_refused_with_the_reason(
    tmp_path: Path, tracker: Board, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(TrackerRefused, match=told):
        prove_tracker(tracker, keys, tmp_path)
