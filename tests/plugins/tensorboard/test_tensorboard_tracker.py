"""TensorBoard as a tracker: on request only, and never beside other files of events."""

from pathlib import Path

import pytest

from offbeat.messages.finding import Level
from offbeat.plugins.tensorboard.plugin import TRACKER, EventsThere, TensorBoardConfig
from offbeat.telemetry.tracker import TrackedRun


def test_it_is_a_sink_where_the_recipe_asks_for_it(tmp_path: Path) -> None:
    run = TrackedRun("r", "n", tmp_path, {})
    assert TRACKER.make_sink(TensorBoardConfig(), run) is None
    sink = TRACKER.make_sink(TensorBoardConfig(enabled=True), run)
    assert sink is not None and sink.name == "tensorboard"


def test_its_package_is_checked_where_the_recipe_asks_for_it() -> None:
    pytest.importorskip("tensorboard")
    assert list(TRACKER.check(TensorBoardConfig(), {})) == []
    (finding,) = TRACKER.check(TensorBoardConfig(enabled=True, x_axis="samples"), {})
    assert (finding.level, finding.message) == (Level.OK, "x axis in samples")


def test_an_export_joins_no_other_files_of_events(tmp_path: Path) -> None:
    run = TrackedRun("r", "n", tmp_path / "run", {})
    place = TRACKER.export_place(run, str(tmp_path / "shown"))
    assert place.where == str(tmp_path / "shown" / "run")
    Path(place.where).mkdir(parents=True)
    (Path(place.where) / "events.out.tfevents.1.offbeat").touch()
    with pytest.raises(EventsThere, match="it has files of events already"):
        TRACKER.export_place(run, str(tmp_path / "shown"))
