import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sink_fakes import CountedPauses, FailsBySchedule, FakeSink, HeldPause
from structlog.testing import capture_logs

from offbeat.config.run import RunConfig
from offbeat.telemetry.hub import Telemetry, run_telemetry
from offbeat.telemetry.records import read_metrics
from offbeat.telemetry.spool import SinkCounts
from offbeat.telemetry.tracker import SinkUnusable, TrackedRun

DOWN = ConnectionError("down")


def emit_steps(telemetry: Telemetry, first: int, last: int) -> None:
    for step in range(first, last + 1):
        telemetry.emit(step, step, {"train/reward": step / 10})


def test_every_sink_gets_every_record_in_order() -> None:
    one, other = FakeSink("one"), FakeSink("other")
    telemetry = Telemetry([one, other], now=lambda: 7.5)
    telemetry.start()
    emit_steps(telemetry, 1, 100)
    telemetry.close(30)
    assert one.steps == other.steps == list(range(1, 101))
    assert one.records[4].metrics == {"train/reward": 0.5}
    assert one.records[4].time_s == 7.5
    assert one.closed
    assert other.closed


def test_a_run_that_ends_before_the_start_loses_nothing() -> None:
    sink = FakeSink()
    telemetry = Telemetry([sink])
    emit_steps(telemetry, 1, 3)
    telemetry.close(30)
    assert sink.steps == [1, 2, 3]


def test_a_record_does_not_change_when_the_caller_reuses_its_dict() -> None:
    sink = FakeSink()
    telemetry = Telemetry([sink])
    metrics = {"train/reward": 1.0}
    telemetry.emit(1, 1, metrics)
    metrics["train/reward"] = 2.0
    telemetry.start()
    telemetry.close(30)
    assert sink.records[0].metrics == {"train/reward": 1.0}


def test_a_sink_that_raises_is_tried_again_later_and_later() -> None:
    sink, pauses = FakeSink(), CountedPauses()
    sink.raises = [DOWN] * 8
    telemetry = Telemetry([sink], pause=pauses)
    sink.gate.clear()
    telemetry.start()
    emit_steps(telemetry, 1, 3)
    assert sink.entered.wait(30)
    sink.gate.set()
    sink.wait_for(3)
    telemetry.close(30)
    assert pauses.asked_s == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert telemetry.tallies() == (SinkCounts("fake", 3, 0, 0, 8),)


def test_a_sink_that_cannot_open_yet_is_back_filled_in_order() -> None:
    sink, pause = FakeSink(), HeldPause()
    sink.open_raises = [DOWN]
    telemetry = Telemetry([sink], pause=pause)
    telemetry.start()
    assert pause.begun.wait(30)
    emit_steps(telemetry, 1, 50)
    telemetry.close(30)  # ends the pause: one more try, which succeeds
    assert sink.steps == list(range(1, 51))


def test_a_full_spool_loses_its_oldest_records_and_no_other_sinks() -> None:
    dead, healthy = FakeSink("dead"), FakeSink("healthy")
    dead.gate.clear()
    telemetry = Telemetry([dead, healthy], capacity=4)
    telemetry.start()
    for step in range(1, 12):
        emit_steps(telemetry, step, step)
        assert dead.entered.wait(30)
        healthy.wait_for(step)
    dead.gate.set()
    with capture_logs() as logs:
        lost, kept = telemetry.close(30)
    assert dead.steps == [1, 8, 9, 10, 11]  # the one in hand, then the newest four
    assert (lost.dropped, lost.written, lost.pending) == (6, 5, 0)
    assert (kept.dropped, kept.written, kept.pending) == (0, 11, 0)
    assert [(log["event"], log["sink"]) for log in logs] == [("sink.incomplete", "dead")]


def test_closing_leaves_a_sink_that_hangs_behind() -> None:
    sink = FakeSink()
    sink.gate.clear()
    telemetry = Telemetry([sink])
    telemetry.start()
    emit_steps(telemetry, 1, 3)
    assert sink.entered.wait(30)
    began = time.monotonic()
    with capture_logs() as logs:
        (tally,) = telemetry.close(0.02)
    assert time.monotonic() - began < 10
    assert (tally.written, tally.pending) == (0, 3)
    assert logs[0]["closed"] is False
    sink.gate.set()


def test_closing_does_not_wait_for_a_sink_in_its_pause() -> None:
    sink, pause = FakeSink(), HeldPause()
    sink.raises = [DOWN, DOWN]
    telemetry = Telemetry([sink], pause=pause)
    telemetry.start()
    emit_steps(telemetry, 1, 2)
    assert pause.begun.wait(30)
    (tally,) = telemetry.close(30)
    assert (tally.written, tally.pending, tally.failures) == (0, 2, 2)
    assert sink.closed


def test_an_unusable_sink_is_reported_once_and_holds_nothing() -> None:
    sink = FakeSink()
    sink.open_raises = [SinkUnusable("wandb", "it is not installed", "Install it")]
    telemetry = Telemetry([sink])
    with capture_logs() as logs:
        telemetry.start()
        emit_steps(telemetry, 1, 5)
        (tally,) = telemetry.close(30)
    assert (tally.written, tally.dropped, tally.pending, tally.failures) == (0, 5, 0, 0)
    assert [log["event"] for log in logs] == ["sink.unusable", "sink.incomplete"]
    assert logs[0]["detail"] == "nothing is written to wandb: it is not installed. Install it"


def test_an_outage_is_two_log_lines_however_long_it_lasts() -> None:
    sink = FakeSink()
    sink.raises = [DOWN] * 9
    telemetry = Telemetry([sink], pause=CountedPauses())
    with capture_logs() as logs:
        telemetry.start()
        emit_steps(telemetry, 1, 1)
        sink.wait_for(1)
        telemetry.close(30)
    assert [log["event"] for log in logs] == ["sink.failing", "sink.recovered"]


def test_an_undeclared_metric_is_kept_and_reported_once() -> None:
    sink = FakeSink()
    telemetry = Telemetry([sink])
    with capture_logs() as logs:
        telemetry.emit(1, 1, {"train/rewrad": 1.0})
        telemetry.emit(2, 2, {"train/rewrad": 1.0})
    telemetry.start()
    telemetry.close(30)
    assert len(sink.records) == 2
    (log,) = logs
    assert "'train/reward'" in log["detail"]


def test_a_value_that_is_no_number_costs_no_other_metric_and_no_record() -> None:
    sink = FakeSink()
    telemetry = Telemetry([sink])
    broken: dict[str, Any] = {"train/loss": "high", "train/reward": np.float32(0.5)}
    with capture_logs() as logs:
        telemetry.emit(1, 1, broken)
        telemetry.emit(2, 2, broken)
    telemetry.start()
    telemetry.close(30)
    assert [record.metrics for record in sink.records] == [{"train/reward": 0.5}] * 2
    assert [(log["event"], log["metric"]) for log in logs] == [
        ("metric.not_a_number", "train/loss")
    ]


@pytest.mark.plugins
def test_a_run_writes_metrics_jsonl_into_its_directory_and_nothing_that_it_does_not_want(
    tmp_path: Path,
) -> None:
    config = RunConfig.model_validate(
        {"steps": 2, "model": {"path": "."}, "wandb": {"mode": "disabled"}}
    )
    telemetry = run_telemetry(config, TrackedRun("r", "n", tmp_path, {}))
    telemetry.start()
    emit_steps(telemetry, 1, 2)
    tallies = telemetry.close(30)
    assert [tally.sink for tally in tallies] == ["metrics.jsonl"]
    assert [record.step for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_after_close_nothing_is_taken() -> None:
    sink = FakeSink()
    telemetry = Telemetry([sink])
    telemetry.start()
    telemetry.close(30)
    emit_steps(telemetry, 1, 1)
    (tally,) = telemetry.close(30)
    assert sink.steps == []
    assert (tally.written, tally.dropped, tally.pending) == (0, 0, 0)


def test_emit_waits_for_no_sink_that_hangs_and_its_spool_overflows() -> None:
    sinks = [FakeSink("blocked"), FakeSink("other")]
    sinks[0].gate.clear()
    telemetry = Telemetry(sinks, capacity=100)
    telemetry.start()
    emit_steps(telemetry, 1, 1000)  # returns although nothing opens the gate meanwhile
    assert sinks[0].steps == []
    sinks[0].gate.set()
    blocked, _ = telemetry.close(30)
    assert blocked.dropped + blocked.written == 1000
    assert blocked.dropped >= 899  # the spool holds 100, the sink one


@given(st.lists(st.booleans(), max_size=40))
def test_whatever_fails_a_sink_sees_each_step_once_and_in_order(failures: list[bool]) -> None:
    sink = FailsBySchedule(failures)
    telemetry = Telemetry([sink], pause=CountedPauses())
    emit_steps(telemetry, 1, 10)
    telemetry.start()
    sink.wait_for(10)
    (tally,) = telemetry.close(30)
    assert sink.steps == list(range(1, 11))
    assert tally.written == 10
