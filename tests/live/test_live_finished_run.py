"""A run that ends as it should: what it left on disk, and what it did not leave behind."""

from collections.abc import Iterator

import pytest

from tests.support.live_run import LiveRun
from tests.support.run_records import RunRecords, temporary_files
from tests.support.starting import ROOT, STUB, Start

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
pytestmark = pytest.mark.both_runtimes
STEPS, GROUPS, SAMPLES = 16, 16, 16


@pytest.fixture(scope="module")
def finished(start: Start) -> Iterator[LiveRun]:
    with start("finished", QUICKSTART, f"steps={STEPS}") as run:
        run.trained_steps(3)
        assert run.exit_code() == 0
        yield run


@pytest.fixture(scope="module")
def records(finished: LiveRun) -> RunRecords:
    return RunRecords.read(finished.run_dir)


def test_ledger_journal_summary_and_trainer_tell_one_story(records: RunRecords) -> None:
    records.agree()
    assert records.summary.outcome == "finished"
    assert records.summary.groups.trained == STEPS * GROUPS
    assert [line["step"] for line in records.metrics] == list(range(1, STEPS + 1))


def test_training_is_off_policy_within_its_bound(records: RunRecords) -> None:
    staleness = records.summary.staleness_histogram
    assert max(staleness) == 1 and staleness[1] > 0
    assert sum(staleness.values()) == STEPS * GROUPS * SAMPLES
    records.no_token_is_from_the_future()


def test_a_finished_run_leaves_only_its_directory(finished: LiveRun) -> None:
    finished.nothing_is_left()
    assert temporary_files(finished.run_dir) == []
    assert finished.err == ""
    finished.talks_to_people()


def test_a_second_run_is_refused_the_directory(finished: LiveRun, start: Start) -> None:
    with start(finished.run_dir.name, STUB) as second:
        assert second.exit_code() == 2
        assert f"{finished.run_dir} holds another run" in second.err
        assert "--run-dir" in second.err
