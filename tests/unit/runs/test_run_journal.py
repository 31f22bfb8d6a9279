"""A run is read of the aggregates beside its snapshots, and they say what its records say."""

from pathlib import Path

import pytest

from offbeat.controller.events import StepApplied
from offbeat.controller.journal import read_journal, read_parts
from offbeat.controller.run_stats import RunStats
from offbeat.runs.applied_steps import AppliedSteps
from offbeat.runs.replay import replay
from offbeat.runs.run_journal import RunJournal
from offbeat.runs.why import why
from tests.support import shown_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with losses, a rewind over several snapshots, and a controller that was replaced."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return shown_run.with_losses(path, 80, snapshot_records=97)


@pytest.fixture
def copied(run_dir: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in run_dir.rglob("*"):
        target = copy / path.relative_to(run_dir)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    return copy


def test_parts_cover_every_record_once_over_losses_and_a_new_controller(run_dir: Path) -> None:
    read = read_parts(run_dir / "journal")
    assert len(read.parts) > 10
    assert read.problems == []
    assert sum(part.aggregates.records for part in read.parts) == sum(
        1 for _ in read_journal(run_dir / "journal")
    )
    firsts = [part.aggregates.first_segment for part in read.parts[1:]]
    assert firsts == [part.before for part in read.parts[:-1]]


def test_aggregates_say_what_one_fold_of_all_records_says(run_dir: Path) -> None:
    fold = RunStats()
    for event in read_journal(run_dir / "journal"):
        fold.add(event)
    whole, parts = [fold.end_part(1)], RunJournal(run_dir).aggregates
    for name, column in AppliedSteps(whole).columns().items():
        assert column == pytest.approx(AppliedSteps(parts).columns()[name], nan_ok=True), name


def test_steps_that_a_rewind_undoes_in_earlier_parts_are_gone(run_dir: Path) -> None:
    parts = RunJournal(run_dir).aggregates
    assert any(part.undone_to is not None for part in parts)
    events = read_journal(run_dir / "journal")
    applied = {event.version: event for event in events if isinstance(event, StepApplied)}
    steps = AppliedSteps(parts)
    assert steps.field("version").tolist() == list(range(1, 81))
    assert steps.field("reward").tolist() == [applied[version].reward for version in range(1, 81)]
    ages = [max(age for age, _ in applied[version].staleness) for version in range(1, 81)]
    assert steps.columns()["off_policy/staleness_max"].tolist() == ages


def test_replay_finds_aggregates_that_their_records_do_not_add_up_to(copied: Path) -> None:
    assert replay(copied).differences == []
    journal = copied / "journal"
    first, second = sorted(journal.glob("aggregates-*.bin"))[2:4]
    second.write_bytes(first.read_bytes())
    (difference, *_) = replay(copied).differences
    assert second.name in difference


def test_a_damaged_file_of_aggregates_is_named_and_its_records_are_read(copied: Path) -> None:
    path = sorted((copied / "journal").glob("aggregates-*.bin"))[4]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (problem,) = RunJournal(copied).problems
    assert path.name in problem
    assert "were read in its place" in problem
    assert any(path.name in each for each in replay(copied).differences)


@pytest.mark.parametrize("kind", ["aggregates", "snapshot"])
def test_a_file_of_another_run_is_named_and_nothing_is_read_of_it(
    run_dir: Path, copied: Path, tmp_path: Path, kind: str
) -> None:
    other = shown_run.with_losses(tmp_path / "other", 60, snapshot_records=83) / "journal"
    replaced = max((copied / "journal").glob(f"{kind}-*.bin"))
    replaced.write_bytes(max(other.glob(f"{kind}-*.bin")).read_bytes())
    found, expected = RunJournal(copied), RunJournal(run_dir)
    assert found.ledger.totals == expected.ledger.totals
    rewards = [AppliedSteps(each.aggregates).field("reward") for each in (found, expected)]
    assert rewards[0].tolist() == rewards[1].tolist()
    if kind == "aggregates":
        (problem,) = found.problems
        assert f"{replaced.name} cannot be read" in problem
        assert "it does not belong to the same journal as events-" in problem


def test_why_of_one_group_is_the_same_wherever_reading_begins(run_dir: Path, copied: Path) -> None:
    for kind in ("aggregates", "snapshot"):
        for path in (copied / "journal").glob(f"{kind}-*.bin"):
            path.unlink()
    drawn = RunJournal(run_dir).ledger.totals.drawn
    for index in range(0, drawn, drawn // 6):
        assert why(run_dir, str(index)) == why(copied, str(index))


def test_of_a_long_journal_the_last_groups_and_some_earlier_ones_are_read(run_dir: Path) -> None:
    journal = RunJournal(run_dir)
    count = len(journal.aggregates)
    assert journal.stretches(10**9) == [range(count)]
    some = journal.stretches(600)
    assert some[0].start == 0
    assert some[-1].stop == count
    assert len(some) > 2
    read = sum(journal.aggregates[each].records for stretch in some for each in stretch)
    assert read < sum(part.records for part in journal.aggregates) / 2
