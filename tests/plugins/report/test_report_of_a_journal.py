"""The page of a run is the same, whichever files of aggregates are there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.controller.journal import read_journal
from offbeat.controller.run_stats import RunStats
from offbeat.plugins.report.document import PAGE_BYTES, document, fitting, stories
from offbeat.plugins.report.timeline import Timeline
from offbeat.runs.run_journal import RunJournal
from tests.unit.runs.test_run_journal import copied, run_dir

__all__ = ["copied", "run_dir"]  # fixtures


def as_plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: as_plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [as_plain(each) for each in tree]
    return np.nan_to_num(tree, nan=-1.0).tolist() if isinstance(tree, np.ndarray) else tree


def shown(run_dir: Path) -> dict[str, Any]:
    (facts,) = document([run_dir])["runs"]
    for key in ("directory", "problems"):
        del facts[key]
    return as_plain(facts)


def test_lanes_and_incidents_of_aggregates_are_the_same_as_of_all_records(run_dir: Path) -> None:
    fold = RunStats()
    for event in read_journal(run_dir / "journal"):
        fold.add(event)
    whole, parts = Timeline([fold.end_part(1)]), Timeline(RunJournal(run_dir).aggregates)
    assert whole.all_incidents() == parts.all_incidents()
    for lane, other in zip(whole.lanes(), parts.lanes(), strict=True):
        assert lane.down == other.down
        assert lane.busy.sum() == pytest.approx(other.busy.sum(), abs=0.01), lane.name


@pytest.mark.parametrize("gone", ["aggregates", "snapshot", "both"])
def test_a_file_that_is_gone_costs_reading_time_and_changes_nothing(
    run_dir: Path, copied: Path, gone: str
) -> None:
    for kind in ("aggregates", "snapshot"):
        if gone in {kind, "both"}:
            for path in sorted((copied / "journal").glob(f"{kind}-*.bin"))[3:6]:
                path.unlink()
    expected, found = shown(run_dir), shown(copied)
    for lane, other in zip(expected.pop("lanes"), found.pop("lanes"), strict=True):
        assert lane["busy"] == pytest.approx(other["busy"], abs=40), "bins of other widths"
    del expected["attribution"], found["attribution"]
    assert found == expected
    if gone != "snapshot":
        assert "cannot be read" in document([copied])["runs"][0]["problems"][0]


def test_a_page_beyond_its_size_is_made_again_with_less_and_says_so(run_dir: Path) -> None:
    sentences = list[list[str]]()

    def make(facts: dict[str, Any]) -> str:
        sentences.append(facts["runs"][0]["thinned"])
        return "x" * (3 * PAGE_BYTES // len(sentences))

    assert len(fitting(stories([run_dir]), make)) == PAGE_BYTES
    assert sentences[0] == []
    assert "at most 5 MB, it has one of 4" in sentences[-1][-1]
