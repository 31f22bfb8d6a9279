"""Compares step logs of two trainers.

Time to a reward, samples and tokens per second, and the ratios.

    python benchmarks/trl/compare.py --peer runs/bench/trl_4*.json --ours runs/bench/offbeat_4*.json

A log is a JSON list with one record a step: ``t_s`` seconds since training began, ``reward`` mean of the
step, ``samples`` and ``tokens`` (prompt and completion) of the step, ``completion_tokens`` of them, and ``cpu_s``
seconds of CPU of the step, over all threads and processes. The CPU time compares two sides on a machine
that other programs use, too.
With several logs of a side, each figure is the median over them. A ratio above 1 means ours is better.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

WARM_UP_STEPS = 2
"""Left out of the rates: the first use of memory and kernels is not what a long run pays."""


class Record(TypedDict):
    """One optimizer step."""

    t_s: float
    reward: float
    samples: int
    tokens: int
    completion_tokens: int
    cpu_s: float


Quantity = Literal["samples", "tokens", "completion_tokens"]
Log = Sequence[Record]


class Row(NamedTuple):
    """One line of the table."""

    name: str
    measure: Callable[[Log], float]
    lower_is_better: bool = False


def time_to_reward_s(log: Log, threshold: float, window_steps: int) -> float:
    """Return when the mean reward of ``window_steps`` steps first reached the threshold.

    Infinity if never.
    """
    for end in range(window_steps, len(log) + 1):
        window = log[end - window_steps : end]
        if statistics.fmean(record["reward"] for record in window) >= threshold:
            return window[-1]["t_s"]
    return math.inf


def rate_per_s(log: Log, quantity: Quantity) -> float:
    """Return how much of a quantity one second brought, over the steps after the warm-up."""
    elapsed_s = log[-1]["t_s"] - log[WARM_UP_STEPS - 1]["t_s"]
    return sum(record[quantity] for record in log[WARM_UP_STEPS:]) / elapsed_s


def cpu_ms_per_sample(log: Log) -> float:
    """Return the milliseconds of CPU that a sample cost, over the steps after the warm-up."""
    steps = log[WARM_UP_STEPS:]
    return 1e3 * sum(step["cpu_s"] for step in steps) / sum(step["samples"] for step in steps)


def table_rows(threshold: float, window_steps: int) -> list[Row]:
    """Return the compared figures, in the order of the table."""
    return [
        Row(
            f"s to reward {threshold:g} ({window_steps}-step mean)",
            lambda log: time_to_reward_s(log, threshold, window_steps),
            lower_is_better=True,
        ),
        Row("samples/s", lambda log: rate_per_s(log, "samples")),
        Row("tokens/s, prompt and completion", lambda log: rate_per_s(log, "tokens")),
        Row("tokens/s, completion only", lambda log: rate_per_s(log, "completion_tokens")),
        Row("CPU per sample, ms", cpu_ms_per_sample, lower_is_better=True),
    ]


def ratio(ours: float, peer: float, *, lower_is_better: bool) -> float:
    """Return how many times better ours is; not a number where neither side got there."""
    better, worse = (peer, ours) if lower_is_better else (ours, peer)
    return math.nan if math.isinf(better) and math.isinf(worse) else better / worse


def shown(value: float) -> str:
    """A figure for people; ``never`` and ``-`` where there is none."""
    if math.isnan(value):
        return "-"
    return "never" if math.isinf(value) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def read_log(path: Path) -> Log:
    """The records of one file.

    Raises:
        ValueError: There are too few steps to leave a warm-up out.
    """
    log: list[Record] = json.loads(path.read_text())
    if len(log) <= WARM_UP_STEPS:
        raise ValueError(f"{path} has {len(log)} steps; a rate needs more than {WARM_UP_STEPS}")
    return log


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare step logs of two trainers.")
    parser.add_argument("--peer", type=Path, nargs="+", required=True, metavar="LOG")
    parser.add_argument("--ours", type=Path, nargs="+", required=True, metavar="LOG")
    parser.add_argument("--reward", type=float, default=0.9, help="threshold of the first line")
    parser.add_argument("--window", type=int, default=5, help="steps its mean is taken over")
    arguments = parser.parse_args()
    peer_logs = [read_log(path) for path in arguments.peer]
    our_logs = [read_log(path) for path in arguments.ours]

    line = "{:<34} {:>12} {:>12} {:>8}"
    print(
        line.format(
            f"medians of {len(our_logs)} and {len(peer_logs)} logs", "offbeat", "peer", "ratio"
        )
    )
    for row in table_rows(arguments.reward, arguments.window):
        ours = statistics.median(row.measure(log) for log in our_logs)
        peer = statistics.median(row.measure(log) for log in peer_logs)
        better = ratio(ours, peer, lower_is_better=row.lower_is_better)
        print(line.format(row.name, shown(ours), shown(peer), shown(better)))


if __name__ == "__main__":
    main()
