"""What a reader of runs says of a path that is not a run."""

from pathlib import Path

import pytest

from offbeat.plugins.watch.server import CannotWatch, check_runs_are_here
from offbeat.runs.directory import what_to_name
from offbeat.runs.past_run import NotARun, find_journal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "sums"
    (run / "journal").mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    return run


def refused_to_watch(path: Path) -> str:
    with pytest.raises(CannotWatch) as refused:
        check_runs_are_here(path)
    return str(refused.value)


def test_of_a_file_of_a_run_the_run_is_named(run: Path) -> None:
    file = run / "metrics.jsonl"
    fix = f"Name the run that contains it, {run}"
    assert refused_to_watch(file) == f"{file}: a file. {fix}, or the directory of runs"
    with pytest.raises(NotARun) as refused:
        find_journal(file)
    assert str(refused.value) == f"{file}: a file. {fix}"


def test_of_a_folder_of_a_run_the_run_is_named(run: Path) -> None:
    told = refused_to_watch(run / "journal")
    assert told == f"{run / 'journal'}: a folder of a run. Name the run that contains it, {run}"


def test_of_the_directory_of_runs_readers_of_one_run_name_some_of_them(run: Path) -> None:
    for name in ("a-note", "b", "c", "d"):
        (run.parent / name).mkdir()
    for name in ("b", "c", "d"):
        (run.parent / name / "journal").mkdir()
    assert what_to_name(run.parent) == f"Name a run, as in {run.parent / 'b'} or {run.parent / 'c'}"


def test_watch_takes_a_run_a_directory_of_runs_and_one_that_waits_for_its_first(run: Path) -> None:
    deeper = run.parent / "a-study" / "arm"
    (deeper / "journal").mkdir(parents=True)
    empty = run.parent.parent / "empty"
    empty.mkdir()
    for directory in (run, run.parent, empty):
        check_runs_are_here(directory)


def test_watch_names_the_directory_of_runs_above_which_it_was_asked(run: Path) -> None:
    above = run.parent.parent
    told = refused_to_watch(above)
    assert told == f"{above}: no run is directly in it. Name the directory of runs, {run.parent}"


def test_what_no_run_is_near_is_told_what_a_run_is(tmp_path: Path) -> None:
    assert "it has config.yaml and journal" in refused_to_watch(tmp_path / "nothing")
