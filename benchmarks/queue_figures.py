"""Computes the results of the queue benchmark.

Medians of rounds, ratios between sides, and the bars to reach.

Pure: figures in, text out. A side is a queue under test; a measure is one figure of it, once a round.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

OURS: Final = "offbeat"
PEER: Final = "peer"
REFS: Final = "refs"


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table."""

    key: str
    title: str
    unit: str
    better: Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that must hold: a ratio to another side, or the figure itself.

    A ratio says how many times better ours is, whichever way the measure counts: 2 is twice the
    rate or half the time. ``at_least`` bounds it; a figure against nobody is bounded ``at_most``.
    """

    measure: Measure
    against: str | None
    bound: float

    def holds(self, value: float) -> bool:
        """``value`` is on the right side of the bound."""
        return value >= self.bound if self.against else value <= self.bound


class Figures:
    """Figures by measure and side, one a round."""

    def __init__(self) -> None:
        self._rounds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, side: str, figures: Mapping[str, float]) -> None:
        """Add another round of a side."""
        for key, value in figures.items():
            self._rounds[key, side].append(value)

    def rounds(self, measure: Measure, side: str) -> Sequence[float]:
        """Return the rounds in the order measured; empty if the side has none."""
        return self._rounds.get((measure.key, side), ())

    def median(self, measure: Measure, side: str) -> float | None:
        """Over the rounds; None where there are none."""
        rounds = self.rounds(measure, side)
        return statistics.median(rounds) if rounds else None

    def ratio(self, measure: Measure, side: str) -> float | None:
        """Return how many times better ours is than ``side``: the ratio of the medians."""
        ours, theirs = self.median(measure, OURS), self.median(measure, side)
        if not ours or not theirs:
            return None
        return ours / theirs if measure.better == "higher" else theirs / ours

    def value(self, bar: Bar) -> float | None:
        """Return the value to compare with the bar; None where it was not measured."""
        if bar.against:
            return self.ratio(bar.measure, bar.against)
        return self.median(bar.measure, OURS)

    def as_json(self) -> dict[str, dict[str, list[float]]]:
        """Return every round: side by measure."""
        nested: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)
        for (key, side), rounds in self._rounds.items():
            nested[key][side] = rounds
        return dict(nested)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed (nearest rank).

    Raises:
        ValueError: No values.
    """
    ranked = sorted(values)
    if not ranked:
        raise ValueError("a percentile of nothing; measure at least once")
    # integer arithmetic: 0.29 * 100 is 28.999...
    rank = -(-round(share * 1_000_000) * len(ranked) // 1_000_000)
    return ranked[max(rank, 1) - 1]


def table(figures: Figures, measures: Sequence[Measure], sides: Sequence[str]) -> list[str]:
    """A line a measure: the median of each side, its range, and how many times better ours is."""
    others = [side for side in sides if side != OURS]
    head = f"{'median of rounds (lowest to highest)':<44}"
    head += "".join(f"{side:>28}" for side in sides)
    head += "".join(f"{'x ' + side:>10}" for side in others if OURS in sides)
    lines = [head]
    for measure in measures:
        if not any(figures.rounds(measure, side) for side in sides):
            continue
        line = f"{measure.title + ', ' + measure.unit:<44}"
        line += "".join(f"{_cell(figures, measure, side):>28}" for side in sides)
        if OURS in sides:
            line += "".join(f"{_number(figures.ratio(measure, side)):>10}" for side in others)
        lines.append(line)
    return lines


def verdicts(figures: Figures, bars: Sequence[Bar]) -> list[str]:
    """A line a bar that was measured: does it hold."""
    lines: list[str] = []
    for bar in bars:
        value = figures.value(bar)
        if value is None:
            continue
        against = f" x {bar.against}" if bar.against else ""
        bound = f"{'>=' if bar.against else '<='} {_number(bar.bound)}"
        word = "holds " if bar.holds(value) else "MISSES"
        lines.append(f"{word}  {bar.measure.title}: {_number(value)}{against} (bar {bound})")
    return lines


def _cell(figures: Figures, measure: Measure, side: str) -> str:
    rounds = figures.rounds(measure, side)
    if not rounds:
        return "-"
    median = _number(statistics.median(rounds))
    return f"{median} ({_number(min(rounds))} to {_number(max(rounds))})"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
