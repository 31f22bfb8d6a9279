"""What the timed loops of the queue benchmark count as wrong."""

from benchmarks.queue_client import wrong_rows
from benchmarks.queue_payloads import SAMPLES, group, joined, large, payload_bytes, split


def test_every_row_once_is_right_in_any_order() -> None:
    assert wrong_rows([1, 0] * SAMPLES, 2) == 0


def test_rows_that_are_missing_repeated_or_unknown_are_wrong() -> None:
    assert wrong_rows([0] * (SAMPLES - 1), 1) == 1
    assert wrong_rows([0] * (SAMPLES + 2), 1) == 2
    assert wrong_rows([*[0] * SAMPLES, 7], 1) == 1
    assert wrong_rows([], 2) == 2 * SAMPLES


def test_the_same_bytes_in_more_columns_are_about_as_many() -> None:
    volume = payload_bytes(group(0, 2048))
    for columns in (1, 8, 32):
        assert abs(payload_bytes(split(0, columns, volume)) - volume) < volume / 100


def test_payloads_carry_the_number_of_their_group() -> None:
    rows = joined([group(3, 4), group(5, 4)])["reward"]
    assert rows[:, 0].tolist() == [3.0] * SAMPLES + [5.0] * SAMPLES


def test_a_large_payload_has_its_megabytes() -> None:
    assert large(2)["x"].nbytes == 2 << 20
