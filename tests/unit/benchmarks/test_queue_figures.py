"""The figures of the queue benchmark, on rounds one can work out by hand."""

import pytest

from benchmarks.queue_figures import OURS, PEER, Bar, Figures, Measure, percentile, table, verdicts

RATE = Measure("rate", "stream", "groups/s", "higher")
TIME = Measure("time", "put", "ms", "lower")


def figures() -> Figures:
    measured = Figures()
    for rate, time in ((100.0, 2.0), (900.0, 1.0), (300.0, 4.0)):
        measured.add(OURS, {"rate": rate, "time": time})
    measured.add(PEER, {"rate": 30.0, "time": 5.0})
    return measured


def test_the_median_over_the_rounds_counts() -> None:
    assert figures().median(RATE, OURS) == 300.0
    assert figures().median(RATE, "nobody") is None


def test_a_ratio_says_how_many_times_better_ours_is_whichever_way_the_measure_counts() -> None:
    assert figures().ratio(RATE, PEER) == pytest.approx(10.0)
    assert figures().ratio(TIME, PEER) == pytest.approx(2.5)
    assert figures().ratio(TIME, "nobody") is None


def test_a_bar_holds_at_its_bound() -> None:
    assert verdicts(figures(), [Bar(RATE, PEER, 10)])[0].startswith("holds")
    assert verdicts(figures(), [Bar(RATE, PEER, 10.1)])[0].startswith("MISSES")
    assert verdicts(figures(), [Bar(TIME, None, 2.0)])[0].startswith("holds")
    assert verdicts(figures(), [Bar(TIME, None, 1.9)])[0].startswith("MISSES")


def test_a_bar_that_was_not_measured_is_not_judged() -> None:
    assert verdicts(figures(), [Bar(RATE, "nobody", 1)]) == []


def test_a_zero_is_a_figure() -> None:
    measured = Figures()
    measured.add(OURS, {"time": 0.0})
    assert verdicts(measured, [Bar(TIME, None, 0.0)])[0].startswith("holds")


def test_the_table_has_a_line_for_each_measure_somebody_has() -> None:
    lines = table(figures(), [RATE, TIME, Measure("none", "none", "ms", "lower")], [OURS, PEER])
    assert len(lines) == 3
    assert "300 (100 to 900)" in lines[1]


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile(range(1, 101), 0.29) == 29
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="measure at least once"):
        percentile([], 0.5)
