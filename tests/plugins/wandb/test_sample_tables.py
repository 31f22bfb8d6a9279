"""Tables of samples: which steps have one, and when their texts are found."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat.plugins.wandb.sample_tables import SampleTables, tables_of
from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.step_samples import SampleRow, StepSamples
from offbeat.telemetry.tracker import TrackedRun
from tests.plugins.wandb.logged import logged_table, parquet


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 60.0
        return self.now


def record(step: int, *indices: int) -> MetricRecord:
    rows = tuple(SampleRow(index, 1, 0, 1.0, 0.5) for index in indices)
    return MetricRecord(step, step, 0.0, {}, StepSamples(None, None, rows))


def test_a_table_waits_until_all_its_samples_are_logged(tmp_path: Path) -> None:
    tables = SampleTables(tmp_path, "", 1, 4, Clock())
    tables.add(record(1, 5, 6))
    assert tables.take() is None
    pq.write_table(logged_table(5, prompt="a", response="b"), parquet(tmp_path, "first"))
    assert tables.take() is None
    pq.write_table(logged_table(6, prompt="c", response="d"), parquet(tmp_path, "second"))
    table = tables.take()
    assert table is not None
    assert [row[2:6] for row in table.rows] == [(5, 0, "a", "b"), (6, 0, "c", "d")]
    assert tables.take(is_last=True) is None


def test_files_are_searched_at_most_every_ten_seconds_until_the_run_ends(tmp_path: Path) -> None:
    tables = SampleTables(tmp_path, "", 1, 4, lambda: 1.0)
    tables.add(record(1, 5))
    assert tables.take() is None
    pq.write_table(logged_table(5, prompt="a", response="b"), parquet(tmp_path))
    assert tables.take() is None
    assert tables.take(is_last=True) is not None


def test_only_step_1_and_every_nth_step_have_samples_and_no_more_than_asked(
    tmp_path: Path,
) -> None:
    pq.write_table(logged_table(5, prompt="a", response="b"), parquet(tmp_path))
    tables = SampleTables(tmp_path, "", 3, 2, Clock())
    for step in range(1, 8):
        tables.add(record(step, 5, 5, 5))
    tables.add(MetricRecord(9, 9, 0.0, {"eval/reward": 1.0}))
    table = tables.take()
    assert table is not None
    assert [row[0] for row in table.rows] == [1, 1, 3, 3, 6, 6]
    assert table.step == 6


def test_samples_that_are_never_logged_are_given_up_and_hold_nothing_up(tmp_path: Path) -> None:
    pq.write_table(logged_table(5, prompt="a", response="b"), parquet(tmp_path))
    tables = SampleTables(tmp_path, "", 1, 4, Clock())
    tables.add(record(1, 404))
    tables.add(record(2, 5))
    assert tables.take() is None
    for step in range(3, 18):
        tables.add(record(step, 5))
    table = tables.take()
    assert table is not None
    assert [row[0] for row in table.rows] == [*range(2, 18)]


def test_a_response_without_text_is_decoded_from_its_tokens(tmp_path: Path) -> None:
    pq.write_table(logged_table(5, prompt="a", response=None), parquet(tmp_path))
    tables = SampleTables(tmp_path, "", 1, 4, Clock())
    tables.add(record(1, 5))
    table = tables.take()
    assert table is not None
    assert table.rows[0][5] == "[2][3]"  # no tokenizer is known


def test_the_last_branch_of_a_sample_is_shown_as_one_of_several(tmp_path: Path) -> None:
    branches = [logged_table(5, prompt="a", response=each) for each in ("first", "last")]
    pq.write_table(pa.concat_tables(branches), parquet(tmp_path))
    tables = SampleTables(tmp_path, "", 1, 4, Clock())
    tables.add(record(1, 5))
    table = tables.take()
    assert table is not None
    assert table.rows[0][5] == "[branch 2 of 2] last"


@pytest.mark.parametrize(
    ("recipe", "interval", "has_tables"),
    [
        ({}, 50, True),
        ({}, 0, False),
        ({"rollout": {"log": True}, "model": {"path": "m"}}, 50, True),
        ({"rollout": {"log": False}}, 50, False),
    ],
)
def test_a_run_has_tables_if_its_rollouts_are_logged_and_the_recipe_wants_them(
    tmp_path: Path, recipe: dict[str, object], interval: int, *, has_tables: bool
) -> None:
    run = TrackedRun("r", "n", tmp_path, recipe)
    assert (tables_of(run, interval, 4) is not None) is has_tables
