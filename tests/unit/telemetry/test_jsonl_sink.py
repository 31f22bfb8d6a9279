import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.telemetry.hub import JsonlSink
from offbeat.telemetry.records import MetricRecord, decode_line, encode_line, read_metrics


def record(step: int, **metrics: float) -> MetricRecord:
    return MetricRecord(
        step, step, 1000.0 + step, {f"train/{name}": v for name, v in metrics.items()}
    )


def written(path: Path, *records: MetricRecord) -> None:
    sink = JsonlSink(path)
    sink.open()
    for each in records:
        sink.write(each)
    sink.close()


def test_a_line_begins_with_step_version_and_time(tmp_path: Path) -> None:
    written(tmp_path / "metrics.jsonl", MetricRecord(3, 2, 1000.25, {"train/reward": 0.5}))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step":3,"version":2,"time_s":1000.25,"train/reward":0.5}\n'


def test_a_record_can_be_read_as_soon_as_it_was_written(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.open()
    sink.write(record(1, reward=0.5))
    assert read_metrics(tmp_path / "metrics.jsonl") == [record(1, reward=0.5)]
    sink.close()


def test_what_is_not_finite_stays_valid_json_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, record(1, loss=math.nan, ratio_max=math.inf, ratio_min=-math.inf))
    values = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert values["train/loss"] == "NaN"
    assert values["train/ratio_max"] == "Infinity"
    (again,) = read_metrics(path)
    assert math.isnan(again.metrics["train/loss"])
    assert again.metrics["train/ratio_min"] == -math.inf


def test_no_metric_takes_the_place_of_the_step() -> None:
    line = encode_line(MetricRecord(4, 4, 0.0, {"step": 99.0}))
    assert json.loads(line)["step"] == 4


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, record(1, reward=0.1))
    written(path, record(2, reward=0.2))
    assert [each.step for each in read_metrics(path)] == [1, 2]


@given(st.integers(0, 200))
def test_a_line_torn_by_a_crash_is_cut_away(torn: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        written(path, record(1, reward=0.1), record(2, reward=0.2))
        whole = path.read_bytes()
        path.write_bytes(whole[: max(len(whole) - torn, 0)])
        kept = [each.step for each in read_metrics(path)]
        written(path, record(3, reward=0.3))
        assert [each.step for each in read_metrics(path)] == [*kept, 3]


def test_a_last_line_longer_than_a_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_line(record(1, reward=1.0)) + b"x" * 200_000)
    written(path, record(2, reward=2.0))
    assert path.read_bytes() == encode_line(record(1, reward=1.0)) + encode_line(
        record(2, reward=2.0)
    )


def test_a_write_that_broke_in_the_middle_is_made_good_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.open()
    sink.write(record(1, reward=0.1))
    with path.open("ab") as half:  # what a full disk leaves of a line
        half.write(encode_line(record(2, reward=0.2))[:20])
    sink.write(record(2, reward=0.2))
    sink.close()
    assert [each.step for each in read_metrics(path)] == [1, 2]


def test_two_controllers_that_both_believe_they_write_lose_and_tear_no_record(
    tmp_path: Path,
) -> None:
    """One was frozen, and writes what it had at hand after the next one has begun."""
    path = tmp_path / "metrics.jsonl"
    frozen, following = JsonlSink(path), JsonlSink(path)
    frozen.open()
    frozen.write(record(1, reward=0.1))
    following.open()
    following.write(record(2, reward=0.2))
    following.write(record(3, reward=0.3))
    frozen.write(record(2))
    following.write(record(4, reward=0.4))
    assert [each.step for each in read_metrics(path)] == [1, 2, 3, 2, 4]
    frozen.close()
    following.close()


def test_closing_what_never_opened_is_fine(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "metrics.jsonl").close()
    with pytest.raises(ValueError, match="not open"):
        JsonlSink(tmp_path / "metrics.jsonl").write(record(1))


@given(
    st.builds(
        MetricRecord,
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.floats(0, 2e9).map(lambda t: round(t, 3)),
        st.dictionaries(
            st.text(min_size=1).filter(lambda name: name not in {"step", "version", "time_s"}),
            st.floats(allow_nan=False),
        ),
    )
)
def test_a_record_reads_back_as_it_was_written(original: MetricRecord) -> None:
    assert decode_line(encode_line(original)) == original
