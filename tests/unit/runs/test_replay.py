"""`offbeat replay`: what is folded again is what the run said, or the difference is told."""

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Dispatched,
    DropReason,
    Event,
    Joined,
    Opened,
    Retired,
    ReturnKind,
)
from offbeat.controller.journal import open_journal
from offbeat.controller.ledger import Ledger
from offbeat.launch.commands.main import app
from offbeat.messages.failures import Component
from offbeat.runs.past_run import ImpossibleEvent, NotARun, find_journal, fold_events
from offbeat.runs.replay import replay
from tests.support.recorded_runs import RecordedRun


def offbeat(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """Two steps, one of them taken back, a dropped group, a retried one, one in flight."""
    run = RecordedRun(tmp_path / "run")
    run.train(run.ready(2))
    run.ledger.checkpointed(1, "aa")
    run.ledger.released(1, "d1")
    run.train(run.ready(2))
    run.rewind(1, "rank 0 was lost")
    failed = run.ledger.admit(None)
    run.ledger.dispatch(failed, "generator-0", 1)
    run.ledger.retry(failed, ReturnKind.INFRASTRUCTURE, "engine_lost")
    run.ledger.dispatch(failed, "generator-1", 1)
    run.ledger.drop(run.ledger.admit(None), DropReason.DATA, "reward_nan")
    return run


def test_a_run_that_agrees_exits_with_0_and_says_what_became_of_it(run: RecordedRun) -> None:
    run.summarise()
    run.close()
    found = replay(run.run_dir)
    assert found.agrees
    assert found.summary == "agrees"
    assert found.groups == {
        "drawn": 6, "admitted": 2, "in_flight": 1, "ready": 0, "training": 0, "trained": 2,
        "dropped": 1,
    }  # fmt: skip
    assert (found.lineage, found.trainer_version, found.checkpoints) == (1, 1, [1])
    assert found.rewinds[0].reason == "rank 0 was lost"
    result = offbeat("replay", run.run_dir)
    assert result.exit_code == 0
    for part in (
        "6 drawn = 2 admitted + 1 in_flight + 0 ready + 0 training + 2 trained + 1 dropped",
        "1 engine_lost", "1 reward_nan", "1; rewound to version 1 (rank 0 was lost)", "agree",
    ):  # fmt: skip
        assert part in result.stdout


def test_each_incarnation_is_told_with_its_times_and_a_resume_as_one(tmp_path: Path) -> None:
    times = itertools.count(1795299600, 2)
    for incarnation, driver in ((1, "a"), (2, "a"), (3, "b")):
        run = RecordedRun(
            tmp_path, incarnation=incarnation, driver=driver, unix_s=lambda: next(times)
        )
        run.ledger.admit(None)
        run.close()
    assert [incarnation.resumed for incarnation in replay(tmp_path).incarnations] == [
        False,
        False,
        True,
    ]
    text = offbeat("replay", tmp_path).stdout
    assert "incarnation 1 from 2026-11-21T22:20:00.000Z to 2026-11-21T22:20:02.000Z\n" in text
    assert "incarnation 3 resumed from 2026-11-21T22:20:08.000Z to " in text


def test_of_very_many_checkpoints_people_read_the_first_and_the_last(run: RecordedRun) -> None:
    for _ in range(2000):
        run.train(run.ready(1))
        run.ledger.checkpointed(run.ledger.trainer_version, "aa")
    run.close()
    found = replay(run.run_dir)
    (line,) = (line for line in found.to_text().splitlines() if line.startswith("checkpoints"))
    assert line.startswith("checkpoints   versions 1, 2, 3, 4,")
    assert line.endswith(
        ", ... 1,981 more ..., 1992, 1993, 1994, 1995, 1996, 1997, 1998, 1999, 2000, 2001"
    )
    assert len(found.checkpoints) == 2001


def test_what_the_summary_says_of_the_end_is_told(run: RecordedRun) -> None:
    run.summarise(outcome="failed", error="run failed at step 2: the disk is full")
    run.close()
    assert "agrees: failed: run failed at step 2: the disk" in offbeat("replay", run.run_dir).stdout


def test_an_intent_without_an_outcome_is_the_same_by_the_snapshot_and_by_all_events(
    tmp_path: Path,
) -> None:
    run = RecordedRun(tmp_path, unix_s=lambda: 1795299600.0)
    run.ledger.claim(run.ready(1), 1, 1)
    run.ledger.intend(1, 1)
    run.journal.snapshot()
    run.close()
    assert replay(tmp_path).agrees


def test_for_programs_the_same_is_json(run: RecordedRun) -> None:
    run.close()
    result = offbeat("replay", run.run_dir, "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["groups"]["drawn"], told["summary"], told["differences"]) == (6, "not written", [])


def test_a_run_that_was_ended_early_says_by_what(run: RecordedRun) -> None:
    run.summarise(ended_by="supervision.wall_clock_limit_s=60")
    run.close()
    result = offbeat("replay", run.run_dir)
    assert "agrees: finished: ended by supervision.wall_clock_limit_s=60\n" in result.stdout


def test_a_summary_that_says_something_else_is_told_line_by_line(run: RecordedRun) -> None:
    run.summarise(trainer_version=7, weights_digest="d0")
    run.close()
    result = offbeat("replay", run.run_dir)
    assert result.exit_code == 1
    assert "2 differences:" in result.stdout
    assert "trainer_version: 7 in summary.json, 1 in the journal\n" in result.stdout
    assert "weights_digest: d0 in summary.json, d1 in the journal\n" in result.stdout


def has_lost_processes(run: RecordedRun) -> None:
    for incarnation in "abc":
        run.ledger.note(Joined(Component.ENGINE, "generator-0", incarnation))
        run.ledger.note(Joined(Component.WORKER, "environment-0", incarnation))
    for incarnation in "ab":
        run.ledger.note(Joined(Component.TRAINER, "trainer", incarnation))
    run.ledger.note(Retired("generator-1", "it died at every start"))


def test_restarts_by_the_summary_are_held_against_the_journal(run: RecordedRun) -> None:
    has_lost_processes(run)
    run.summarise(restarts=1, rewinds=0, engines_retired=[])
    run.close()
    assert replay(run.run_dir).differences == [
        "restarts: 1 in summary.json, 2 in the journal",
        "engines_retired: [] in summary.json, ['generator-1'] in the journal",
        "rewinds: 0 in summary.json, 1 in the journal",
    ]


def test_a_summary_that_counts_all_incarnations_agrees(run: RecordedRun) -> None:
    has_lost_processes(run)
    run.close()
    again = RecordedRun(run.run_dir, incarnation=2)
    again.ledger.note(Joined(Component.ENGINE, "generator-0", "d"))
    again.summarise()
    again.close()
    result = offbeat("replay", run.run_dir)
    assert result.exit_code == 0
    assert "3 engine, 1 trainer, 2 worker; retired: generator-1\n" in result.stdout


def test_a_summary_that_is_none_is_a_difference(run: RecordedRun) -> None:
    run.close()
    (run.run_dir / "summary.json").write_text("{")
    assert replay(run.run_dir).differences[0].startswith("summary.json cannot be read")


def test_the_summary_of_an_earlier_incarnation_is_no_difference(run: RecordedRun) -> None:
    run.summarise()
    run.close()
    again = RecordedRun(run.run_dir, incarnation=2)
    again.ledger.admit(None)
    again.close()
    found = replay(run.run_dir)
    assert (found.summary, found.differences) == ("of an earlier incarnation", [])
    assert [incarnation.incarnation for incarnation in found.incarnations] == [1, 2]


def test_a_live_run_can_be_replayed(run: RecordedRun) -> None:
    run.journal.flush_now()
    run.ledger.admit(None)  # not written yet
    assert replay(run.run_dir).groups["drawn"] == 6
    run.close()


def test_a_rewind_is_told_without_the_groups_that_it_undid(run: RecordedRun) -> None:
    run.close()
    (told,) = replay(run.run_dir).rewinds
    assert (told.to_version, told.undone) == (1, ())


def test_a_run_that_has_just_begun_has_nothing_to_tell(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    assert "0 drawn" in offbeat("replay", tmp_path).stdout


@given(st.integers(1, 30), st.lists(st.sampled_from("rtwdc"), max_size=30))
def test_both_folds_agree_wherever_the_snapshots_were_made(
    snapshot_records: int, moves: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RecordedRun(Path(folder), snapshot_records=snapshot_records)
        for move in moves:
            ready = list(run.ledger.ready)
            if move == "r":
                run.ready(2)
            elif move == "t" and ready:
                run.train(ready[:1])
            elif move == "w":
                run.rewind(max(0, run.ledger.trainer_version - 1), "lost")
                for prompt_index in [
                    o for o, g in run.ledger.groups.items() if g.place == "admitted"
                ]:
                    run.rolled_out(prompt_index, run.ledger.trainer_version)
            elif move == "d" and ready:
                run.ledger.drop(ready[-1], DropReason.FILTERED, "flat")
            elif move == "c" and ready:
                run.ledger.evict(ready[0], "stale")
        run.summarise()
        run.close()
        found = replay(Path(folder))
    assert (found.differences, found.summary) == ([], "agrees")
    assert found.groups["trained"] == run.ledger.totals.trained


def test_a_snapshot_that_lies_is_found_out(tmp_path: Path) -> None:
    """The state in a snapshot is not the one that the events before it lead to."""
    run = RecordedRun(tmp_path)
    run.ledger.totals.retried["nothing"] = 3  # behind the journal's back
    run.journal.snapshot()
    run.ledger.admit(None)
    run.close()
    result = offbeat("replay", tmp_path)
    assert result.exit_code == 1
    assert "totals: " in result.stdout and "'nothing': 3" in result.stdout


def test_a_snapshot_that_misses_a_group_is_found_out(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    prompt_index = run.ledger.admit(None)
    hidden = run.ledger.groups.pop(prompt_index)
    run.journal.snapshot()
    run.ledger.groups[prompt_index] = hidden
    run.rolled_out(prompt_index, 0)
    run.close()
    assert replay(tmp_path).differences == [
        (
            "the newest snapshot is not of the events before it: "
            "Dispatched cannot follow: g-000000 was never drawn, or has ended"
        )
    ]


# --- what cannot be looked at --------------------------------------------------------------------


@pytest.mark.parametrize("command", [("replay",), ("why", "412")])
def test_what_is_no_run_is_told_in_one_line_with_exit_code_2(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    name, *rest = command
    for path, problem in (
        (tmp_path / "nothing", "no such directory"),
        (tmp_path, "it holds no journal"),
    ):
        result = offbeat(name, path, *rest)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"offbeat: {path}: {problem}. ")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("has_journal", [False, True])
def test_of_a_run_that_never_began_the_summary_is_named(tmp_path: Path, has_journal: bool) -> None:
    if has_journal:
        _, empty = open_journal(tmp_path / "journal", cast("Any", None), snapshot_records=1000)
        empty.close()
    (tmp_path / "summary.json").write_text("{}")
    told = offbeat("replay", tmp_path).stderr
    assert told == f"offbeat: {tmp_path}: its run ended before its first record. See summary.json\n"


@pytest.mark.parametrize("command", [("replay",), ("why", "0")])
def test_a_damaged_journal_is_told_in_one_line_with_exit_code_2(
    run: RecordedRun, command: tuple[str, ...]
) -> None:
    run.close()
    (segment,) = (run.run_dir / "journal").glob("events-*.bin")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 0xFF
    segment.write_bytes(content)
    name, *rest = command
    result = offbeat(name, run.run_dir, *rest)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "is damaged at byte" in result.stderr


class Miscounting(Ledger):
    """A ledger with a bug that no event contradicts."""

    def apply(self, event: AnyEvent) -> None:
        super().apply(event)
        if isinstance(event, Admitted):
            self.totals.drawn += 1


def test_a_ledger_that_loses_count_is_told_at_the_first_event_that_shows_it(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.ready(1)
    run.close()
    with pytest.raises(ImpossibleEvent, match="groups do not add up") as told:
        list(fold_events(find_journal(tmp_path), Miscounting()))
    assert told.value.event.startswith("Admitted")


@pytest.mark.parametrize(
    "impossible",
    [Dispatched(7, 1, "generator-0", 0), Admitted(0, -1)],
    ids=["a group that was not drawn", "one drawn twice"],
)
def test_an_event_that_cannot_have_happened_is_told_in_one_line(
    tmp_path: Path, impossible: Event
) -> None:
    run = RecordedRun(tmp_path)
    run.ready(1)
    run.journal.append(impossible)
    run.ledger.record(Opened("tiny-1", 1))
    run.close()
    result = offbeat("replay", tmp_path)
    assert result.exit_code == 2
    assert "of the journal cannot have happened" in result.stderr


def test_the_error_keeps_its_fields() -> None:
    error = NotARun("runs/x", "no such directory", "Name another")
    assert NotARun(*error.args).subject == "runs/x"


@pytest.mark.parametrize("name", ["summary.json", "journal/events-000001.bin"])
def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(run: RecordedRun, name: str) -> None:
    run.summarise()
    run.close()
    (run.run_dir / name).unlink()
    os.mkfifo(run.run_dir / name)
    refused = offbeat("replay", run.run_dir)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert f"{name} is not a regular file" in refused.stderr
