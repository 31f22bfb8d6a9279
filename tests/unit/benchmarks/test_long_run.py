"""The run directory that ``benchmarks.long_run`` makes is read as one that a run wrote."""

from pathlib import Path

from benchmarks.long_run import LongRun, make
from offbeat.plugins.report.document import stories


def test_the_page_reads_every_part_of_it(tmp_path: Path) -> None:
    run = LongRun(steps=1200, groups=10)
    make(tmp_path / "run", run)
    (story,) = stories([tmp_path / "run"])
    assert not story.problems
    assert len(story.steps) == run.parts * run.steps_per_part
    assert story.ledger.trainer_version == run.parts * run.steps_per_part
