"""A median that needs no more memory for a million values than for four thousand."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.controller.progress import Reservoir


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_the_median_of_a_short_stream_is_exact(values: list[float]) -> None:
    reservoir = Reservoir(size=50)
    for value in values:
        reservoir.add(value)
    assert reservoir.median() == statistics.median(values)
    assert reservoir.count == len(values)


def test_the_median_of_a_long_stream_is_near_whatever_its_order() -> None:
    reservoir = Reservoir(size=1000)
    for value in range(20_000):
        reservoir.add(float(value))
    assert reservoir.median() == pytest.approx(10_000, rel=0.05)
    assert reservoir.count == 20_000


def test_there_is_no_median_of_nothing() -> None:
    with pytest.raises(statistics.StatisticsError):
        Reservoir().median()
