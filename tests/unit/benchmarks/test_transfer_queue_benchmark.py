"""The count of wrong rows in the benchmark of the transfer queue."""

from benchmarks.transfer_queue import SAMPLES, count_wrong_rows, group, sample_rows
from offbeat.transfer_queue import schema


def test_each_group_that_arrives_once_has_no_wrong_rows() -> None:
    assert count_wrong_rows([*[0] * SAMPLES, *[1] * SAMPLES], 2) == 0


def test_lost_and_repeated_rows_are_counted() -> None:
    assert count_wrong_rows([0] * (SAMPLES - 1), 1) == 1
    assert count_wrong_rows([0] * (SAMPLES + 2), 1) == 2


def test_both_sides_carry_the_same_values() -> None:
    schema.check(group(3, 8))
    rows = sample_rows(3)
    assert rows[schema.RESPONSE_IDS].shape[0] == SAMPLES
    assert set(rows[schema.REWARDS].ravel().tolist()) == {3.0}
