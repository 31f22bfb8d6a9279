"""Histograms of a step, and that only a sink that wants samples gets them."""

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from offbeat.telemetry.hub import JsonlSink, Telemetry
from offbeat.telemetry.records import MetricRecord, encode_line, read_metrics
from offbeat.telemetry.step_samples import BINS, StepSamples, count_in_bins

EMPTY = StepSamples(None, None, ())


class Wanting:
    """A sink that wants samples."""

    name = "wanting"
    wants_samples = True

    def __init__(self) -> None:
        self.records = list[MetricRecord]()

    def open(self) -> None: ...
    def close(self) -> None: ...
    def write(self, record: MetricRecord) -> None:
        self.records.append(record)


@given(st.lists(st.floats(), max_size=50))
def test_every_finite_value_is_counted_once_in_ascending_bins(values: list[float]) -> None:
    counted = count_in_bins(values)
    if counted is None:
        return
    assert sum(counted.counts) == sum(map(math.isfinite, values))
    assert len(counted.edges) == len(counted.counts) + 1 == BINS + 1
    assert list(counted.edges) == sorted(counted.edges)


def test_values_are_in_the_bins_that_hold_them() -> None:
    counted = count_in_bins([0.0, 0.1, 0.9, 1.0, math.inf, math.nan], bins=2)
    assert counted is not None
    assert (counted.edges, counted.counts) == ((0.0, 0.5, 1.0), (2, 2))
    same = count_in_bins([3.0, 3.0], bins=2)
    assert same is not None
    assert (same.edges, same.counts) == ((2.5, 3.0, 3.5), (0, 2))
    assert count_in_bins([math.nan]) is None


def test_samples_are_made_only_if_a_sink_wants_them(tmp_path: Path) -> None:
    made = list[int]()

    def samples() -> StepSamples:
        made.append(1)
        return EMPTY

    plain = Telemetry([JsonlSink(tmp_path / "metrics.jsonl")])
    plain.emit(1, 1, {"train/reward": 0.5}, samples)
    plain.close(10.0)
    assert not made
    sink = Wanting()
    telemetry = Telemetry([JsonlSink(tmp_path / "both.jsonl"), sink])
    telemetry.emit(1, 1, {"train/reward": 0.5}, samples)
    telemetry.emit(2, 1, {"eval/reward": 0.5})
    telemetry.close(10.0)
    assert [record.samples for record in sink.records] == [EMPTY, None]
    assert [record.samples for record in read_metrics(tmp_path / "both.jsonl")] == [None, None]


def test_samples_are_no_part_of_a_line() -> None:
    plain = MetricRecord(1, 1, 1.0, {"train/reward": 0.5})
    assert encode_line(plain) == encode_line(MetricRecord(1, 1, 1.0, plain.metrics, EMPTY))
