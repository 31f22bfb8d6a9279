"""The figures of ``benchmarks/trl/compare.py``, on logs one can work out by hand."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMPARE = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/trl/compare.py"))
time_to_reward_s: Callable[..., float] = COMPARE["time_to_reward_s"]
rate_per_s: Callable[..., float] = COMPARE["rate_per_s"]
cpu_ms_per_sample: Callable[..., float] = COMPARE["cpu_ms_per_sample"]
ratio: Callable[..., float] = COMPARE["ratio"]
read_log: Callable[[Path], Any] = COMPARE["read_log"]


def log_of(*rewards: float) -> list[dict[str, float]]:
    """A step every two seconds, of four samples, 40 tokens, 10 of them generated, 0.5 s of CPU."""
    counts = {"samples": 4, "tokens": 40, "completion_tokens": 10}
    return [
        {"t_s": 2.0 * step, "reward": reward, **counts, "cpu_s": 0.5}
        for step, reward in enumerate(rewards, start=1)
    ]


def test_the_time_to_a_reward_is_when_the_mean_of_the_window_first_reaches_it() -> None:
    log = log_of(0.0, 1.0, 0.0, 1.0, 1.0, 1.0)
    assert time_to_reward_s(log, 0.9, 3) == 12.0
    assert time_to_reward_s(log, 0.5, 2) == 4.0


def test_a_reward_that_is_never_reached_takes_for_ever() -> None:
    assert time_to_reward_s(log_of(0.1, 0.2, 0.3), 0.9, 3) == math.inf
    assert time_to_reward_s(log_of(1.0, 1.0), 0.9, 3) == math.inf


def test_a_rate_leaves_the_first_two_steps_out() -> None:
    log = log_of(*[0.0] * 5)
    log[0]["t_s"], log[0]["samples"] = -100.0, 1000
    assert rate_per_s(log, "samples") == pytest.approx(12 / 6)
    assert rate_per_s(log, "completion_tokens") == pytest.approx(30 / 6)


def test_the_cpu_of_a_sample_leaves_the_first_two_steps_out() -> None:
    log = log_of(*[0.0] * 5)
    log[1]["cpu_s"] = 1000.0
    assert cpu_ms_per_sample(log) == pytest.approx(125.0)


def test_a_ratio_above_one_means_ours_is_better_whichever_way_the_figure_counts() -> None:
    assert ratio(20.0, 60.0, lower_is_better=True) == 3.0
    assert ratio(60.0, 20.0, lower_is_better=False) == 3.0
    assert ratio(20.0, math.inf, lower_is_better=True) == math.inf
    assert math.isnan(ratio(math.inf, math.inf, lower_is_better=True))


def test_a_log_too_short_to_leave_a_warm_up_out_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    path.write_text("[{}, {}]")
    with pytest.raises(ValueError, match=r"short\.json has 2 steps; a rate needs more than 2"):
        read_log(path)
