"""The verdict of ``benchmarks/gate.py``, on costs of two runs."""

import pytest

from benchmarks.gate import (
    QUICK,
    SLOW,
    Costs,
    count_per_unit,
    find_failures,
    find_slow_cases,
    format_table,
    read_reply,
)
from benchmarks.gate_cases import CASES


def make_run(**ratios: float) -> dict[str, Costs]:
    return {name: Costs(pinned=2.0, ours=2.0 * ratio) for name, ratio in ratios.items()}


def test_a_ratio_is_the_cost_of_this_tree_over_the_pinned_ones() -> None:
    assert Costs(pinned=2.0, ours=3.0).ratio == 1.5


def test_instructions_count_per_unit_because_simulated_episodes_differ_by_tree() -> None:
    pinned = count_per_unit(prepared=1000, run=1000 + 4 * 50, units=4)
    ours = count_per_unit(prepared=1000, run=1000 + 5 * 50, units=5)
    assert Costs(pinned, ours).ratio == 1


def test_a_reply_is_the_cpu_seconds_and_the_units_of_a_run() -> None:
    assert read_reply("0.25 1280\n") == (0.25, 1280)


def test_a_case_at_the_limit_is_fast_enough() -> None:
    run = {"at": Costs(1.0, 1.15), "over": Costs(1.0, 1.16), "faster": Costs(1.0, 0.5)}
    assert find_slow_cases(run, limit=1.15) == ["over"]


@pytest.mark.parametrize(
    ("first", "second", "failures"),
    [
        ((1.0, 1.0), (1.0, 1.0), []),
        ((1.3, 1.0), (1.0, 1.0), []),
        ((1.3, 1.0), (1.0, 1.3), []),
        ((1.3, 1.0), (1.2, 1.3), ["controller"]),
        ((1.3, 1.3), (1.2, 1.3), ["controller", "simulator"]),
    ],
)
def test_a_case_fails_only_if_it_is_too_slow_in_both_runs(
    first: tuple[float, float], second: tuple[float, float], failures: list[str]
) -> None:
    runs = (make_run(controller=a, simulator=b) for a, b in (first, second))
    assert find_failures(*runs, limit=1.15) == failures


def test_the_table_marks_what_is_over_the_limit() -> None:
    head, fast, slow = format_table(
        make_run(controller=1.0, simulator=1.2), limit=1.15
    ).splitlines()
    assert head.split() == ["benchmark", "pinned", "this", "tree", "ratio"]
    assert fast.split() == ["controller", "2", "2", "1.00"]
    assert slow.split() == ["simulator", "2", "2.4", "1.20", "over", "1.15"]


def test_every_measured_case_is_defined() -> None:
    assert list(CASES) == [*QUICK, *SLOW]
