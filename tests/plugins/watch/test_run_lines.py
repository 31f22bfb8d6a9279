"""The list of runs of `offbeat watch`: how each ended, how far it came, and what it scored."""

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from offbeat.plugins.watch.run_lines import LISTED, RunLine, RunLines, last_record, sample_rewards
from offbeat.plugins.watch.runs import WatchedRuns
from offbeat.telemetry.records import MetricRecord, encode_line
from offbeat.telemetry.summary import GroupCounts, Summary
from tests.support import shown_run

BEGAN_UNIX_S = 1_790_000_000.0


def lines_of(directory: Path, later_s: float = 0.0) -> dict[str, RunLine]:
    """The lines as they are this many seconds after the last file was written."""
    newest = max((path.stat().st_mtime for path in directory.rglob("*")), default=0.0)
    found = RunLines(WatchedRuns(directory), lambda: newest + later_s).lines()
    return {line.name: line for line in found}


def end(directory: Path, **facts: object) -> Summary:
    """Write the summary of a run that trained nothing."""
    directory.mkdir()
    values = {"run_id": "r", "name": "n", "steps": 0, "trainer_version": 0, "wall_s": 1.5}
    summary = Summary(groups=GroupCounts(), **{**values, **facts})  # pyright: ignore[reportArgumentType]
    summary.write(directory / "summary.json")
    return summary


def write_steps(path: Path, *records: tuple[int, float], padding: int = 0) -> None:
    with path.open("wb") as file:
        for version, reward in records:
            metrics = {"train/reward": reward, **{f"x/{i}": 0.123456789 for i in range(padding)}}
            file.write(encode_line(MetricRecord(version, version, 1.0, metrics)))


def test_a_line_has_outcome_steps_reward_score_start_and_duration(tmp_path: Path) -> None:
    shown_run.finished(tmp_path / "good", 16)
    line = lines_of(tmp_path)["good"]
    assert (line.outcome, line.reason) == ("finished", "")
    assert (line.steps, line.steps_asked, line.reward) == (16, 16, 0.968)
    assert len(line.rewards) == 16
    assert None not in line.rewards
    assert line.score == pytest.approx(0.95)
    assert line.began_unix_s == BEGAN_UNIX_S
    assert line.duration_s == pytest.approx(
        json.loads((tmp_path / "good/summary.json").read_text())["wall_s"]
    )


def test_json_nested_without_end_hides_no_other_run(tmp_path: Path) -> None:
    end(tmp_path / "good", outcome="finished", error=None)
    end(tmp_path / "evil", outcome="finished", error=None)
    for name in ("summary.json", "status.json", "metrics.jsonl"):
        (tmp_path / "evil" / name).write_text('{"x":' + "[" * 100_000 + "\n")
    assert lines_of(tmp_path)["good"].outcome == "finished"


class OneUnreadable:
    """Runs of which one cannot be examined for a reason that nobody has foreseen."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def readable(self) -> list[tuple[str, Any]]:
        return [("evil", None), ("good", self._directory / "good")]


def test_an_unforeseen_error_of_one_run_hides_no_other(tmp_path: Path) -> None:
    end(tmp_path / "good", outcome="finished", error=None)
    lines = RunLines(cast("WatchedRuns", OneUnreadable(tmp_path))).lines()
    assert [line.name for line in lines] == ["good", "evil"]
    assert lines[1].reason.startswith("its files cannot be read")


def test_each_outcome_has_its_word_and_a_failure_its_reason_in_one_line(tmp_path: Path) -> None:
    shown_run.running(tmp_path / "live", 2)
    end(tmp_path / "never", outcome="failed", error="no such module:\n  grader\n" + "x" * 999)
    end(tmp_path / "stopped", outcome="aborted", error=None, ended_by="Ctrl-C")
    lines = lines_of(tmp_path)
    outcomes = {name: line.outcome for name, line in lines.items()}
    assert outcomes == {"live": "running", "never": "failed", "stopped": "stopped"}
    assert lines["never"].reason.startswith("no such module: grader xxx")
    assert len(lines["never"].reason) < 400
    assert lines["stopped"].reason == "ended by Ctrl-C"
    assert (lines["never"].steps, lines["never"].reward) == (0, None)
    assert (lines["live"].steps, lines["live"].steps_asked) == (2, 4)
    assert lines["live"].reward == lines["live"].rewards[-1]


def test_a_run_that_was_killed_is_lost_after_a_while(tmp_path: Path) -> None:
    shown_run.running(tmp_path / "killed", 2)
    assert lines_of(tmp_path, 14.0)["killed"].outcome == "running"
    lost = lines_of(tmp_path, 60.0)["killed"]
    assert (lost.outcome, lost.steps, lost.steps_asked) == ("lost", 2, 4)


def test_a_run_that_only_has_its_recipe_starts_and_is_lost_after_minutes(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for name in ("config.yaml", "inputs.json"):
        (tmp_path / "new" / name).write_text("{}")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "config.yaml").write_text("{}")
    for later_s, outcome in ((60.0, "running"), (3600.0, "lost")):
        lines = lines_of(tmp_path, later_s)
        assert {name: line.outcome for name, line in lines.items()} == {"new": outcome}


def test_a_resumed_run_is_running_although_its_old_summary_is_there(tmp_path: Path) -> None:
    run = shown_run.running(tmp_path / "again", 2)
    (tmp_path / "old").mkdir()
    summary = end(tmp_path / "old" / "x", outcome="failed", error="lost")
    summary.write(run / "summary.json")
    os.utime(run / "summary.json", (1.0, 1.0))
    assert lines_of(tmp_path)["again"].outcome == "running"


def test_torn_and_foreign_files_leave_a_line(tmp_path: Path) -> None:
    for name, content in (("torn", "{"), ("foreign", '{"steps": "many"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(content)
        (tmp_path / name / "metrics.jsonl").write_bytes(b"\xff\n{}\n[]\n")
    lines = lines_of(tmp_path, 3600.0)
    assert {name: line.outcome for name, line in lines.items()} == {
        "torn": "lost",
        "foreign": "lost",
    }


def test_the_newest_start_is_at_the_top_whatever_was_written_last(tmp_path: Path) -> None:
    for name, began_s in (("old", 1e9), ("new", 3e9), ("middle", 2e9)):
        end(tmp_path / name, outcome="finished", error=None)
        (tmp_path / name / "config.yaml").write_text("{}")
        os.utime(tmp_path / name / "config.yaml", (began_s, began_s))
    assert list(lines_of(tmp_path)) == ["new", "middle", "old"]


def test_at_most_so_many_runs_are_listed(tmp_path: Path) -> None:
    for number in range(LISTED + 1):
        (tmp_path / f"run-{number}" / "journal").mkdir(parents=True)
    assert len(lines_of(tmp_path)) == LISTED


def test_an_unchanged_run_is_read_once_and_a_changed_one_again(tmp_path: Path) -> None:
    run = shown_run.finished(tmp_path / "one", 4)
    lines = RunLines(WatchedRuns(tmp_path))
    (first,), (second,) = lines.lines(), lines.lines()
    assert first.rewards is second.rewards
    write_steps(run / "metrics.jsonl", (1, 0.5), (2, 0.75))
    assert lines.lines()[0].rewards == [0.5, 0.75]


def test_steps_that_a_rewind_undid_are_not_in_the_rewards(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, (1, 0.1), (2, 0.9), (3, 0.9), (2, 0.2), (3, float("nan")), (4, 0.4))
    assert sample_rewards(path) == [0.1, 0.2, None, 0.4]
    write_steps(path, (1, 0.1), (2, 0.9), (3, 0.9), (2, 0.2))
    assert sample_rewards(path) == [0.1, 0.2]
    write_steps(path, (1, float("nan")))
    assert sample_rewards(path) == [] == sample_rewards(tmp_path / "none")


def test_of_a_long_file_only_some_steps_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, *((step, step / 4000) for step in range(1, 4001)), padding=60)
    assert path.stat().st_size > 4 * 2**20
    rewards = [value for value in sample_rewards(path) if value is not None]
    assert 30 < len(rewards) <= 40
    assert rewards == sorted(rewards)
    assert rewards[0] < 0.03
    assert rewards[-1] > 0.95


def test_the_score_is_of_the_newest_evaluation_and_names_its_set(tmp_path: Path) -> None:
    run = shown_run.running(tmp_path / "live", 2)
    with (run / "metrics.jsonl").open("wb") as file:
        scores = {"eval/version": 2.0, "eval/sums/reward": 0.25, "eval/sums/pass@1": 0.5}
        file.write(encode_line(MetricRecord(2, 2, 1.0, scores)))
    line = lines_of(tmp_path)["live"]
    assert (line.score_name, line.score) == ("sums", 0.25)


def test_a_pipe_in_place_of_the_metrics_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert sample_rewards(tmp_path / "metrics.jsonl") == []
    assert last_record(tmp_path) is None
