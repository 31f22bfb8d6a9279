"""Patience with a controller, and the last word of one that died untold."""

import itertools
from pathlib import Path

import pytest

from offbeat.config.run import RunConfig
from offbeat.controller.events import DropReason
from offbeat.controller.journal import JournalCorrupt, recover
from offbeat.launch.screen import HeartbeatTimeout
from offbeat.messages.failures import DeadlineExceeded
from offbeat.runs.unfinished import last_summary
from offbeat.telemetry.summary import Summary
from tests.support.recorded_runs import RecordedRun

CONFIG = RunConfig.model_validate({
    "name": "tiny", "steps": 10, "model": {"path": "none"}, "sampler": {"name": "ready_first"}
})  # fmt: skip


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_controller_whose_process_starts_slowly_is_not_taken_for_frozen() -> None:
    clock = Clock()
    silence = HeartbeatTimeout(clock)
    clock.now_s = 299
    silence.check()
    clock.now_s = 301
    with pytest.raises(DeadlineExceeded, match="300 s"):
        silence.check()


def test_a_controller_that_has_answered_may_be_silent_for_a_minute() -> None:
    clock = Clock()
    silence = HeartbeatTimeout(clock)
    clock.now_s = 200
    silence.broken()
    clock.now_s = 259
    silence.check()
    clock.now_s = 261
    with pytest.raises(DeadlineExceeded, match="60 s"):
        silence.check()


def test_of_a_controller_that_died_untold_the_journal_tells_what_it_can(tmp_path: Path) -> None:
    times = itertools.count(1000.0)
    run = RecordedRun(tmp_path, unix_s=lambda: next(times))
    run.ledger.released(0, "d0")
    run.train(run.ready(2))
    run.ledger.drop(run.ledger.admit(None), DropReason.DATA, "reward_nan")
    run.close()
    told = last_summary(tmp_path, CONFIG, "tiny-1", "failed", "it was killed")
    assert (told.outcome, told.error) == ("failed", "it was killed")
    assert (told.steps, told.steps_asked, told.groups.dropped) == (1, 10, {"reward_nan": 1})
    assert (told.reward_last, told.staleness_histogram) == (0.5, {0: 4})
    assert told.wall_s == 12, "thirteen records, one a second"
    assert told.weights_digest == "d0"


def test_of_a_run_that_never_had_a_controller_there_is_a_summary_too(tmp_path: Path) -> None:
    told = last_summary(tmp_path, CONFIG, "tiny-1", "failed", "no room")
    assert (told.steps, told.wall_s, told.controller_incarnations) == (0, 0, 1)


def test_a_damaged_journal_does_not_hide_how_the_run_ended(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.ledger.released(0, "d0")
    run.train(run.ready(2))
    run.close()
    segment = next((tmp_path / "journal").glob("events-*.bin"))
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    segment.write_bytes(damaged)
    told = last_summary(tmp_path, CONFIG, "tiny-1", "failed", "it was killed")
    assert told.outcome == "failed"
    assert told.error is not None
    assert told.error.startswith("it was killed; nothing is counted here: journal ")
    assert "is damaged at byte" in told.error
    assert Summary.from_json((tmp_path / "summary.json").read_bytes()) == told


def test_a_damage_that_ended_the_run_is_told_once(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.close()
    segment = next((tmp_path / "journal").glob("events-*.bin"))
    segment.write_bytes(b"?" * 100)
    with pytest.raises(JournalCorrupt) as damage:
        recover(tmp_path / "journal")
    problem = f"JournalCorrupt: {damage.value}"
    assert last_summary(tmp_path, CONFIG, "tiny-1", "failed", problem).error == problem


@pytest.mark.parametrize("content", [b"", b"{", b'{"run_id": 3}', b"\xff", b'{"run_id": "\xff"}'])
def test_a_damaged_summary_is_made_again_from_the_journal(tmp_path: Path, content: bytes) -> None:
    run = RecordedRun(tmp_path)
    run.ledger.released(0, "d0")
    run.train(run.ready(2))
    run.close()
    (tmp_path / "summary.json").write_bytes(content)
    assert last_summary(tmp_path, CONFIG, "tiny-1", "failed", "it was killed").steps == 1
