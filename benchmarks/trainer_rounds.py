"""Sides measured in turn, round after round, and what becomes of their figures. No torch."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Step = Callable[[], object]


class Spread(NamedTuple):
    """A figure over several rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of one value per round."""
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.lowest:{spec}} to {self.highest:{spec}})"


class Turn(NamedTuple):
    """A side's turn: seconds a step."""

    wall_s: float
    cpu_s: float  # of this process, all threads: what others on the machine take hardly shows in it


Clocks = Callable[[], tuple[float, float]]


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds."""
    return time.perf_counter(), time.process_time()


def in_turn(
    sides: Mapping[str, Step], *, rounds: int, turn_s: float, clock: Clocks = clocks
) -> dict[str, list[Turn]]:
    """Return one figure per side and round.

    Every side warms up first. A turn is as many steps as the quickest side makes in ``turn_s``, the
    same number for all. Each round begins with another side, so that none is always the one whose
    neighbour has just filled the caches.

    Args:
        sides: A step of each.
        rounds: Turns of each side.
        turn_s: Length of a turn, of the quickest side; a turn has one step at least.
        clock: Wall and CPU seconds.
    """

    def turn(step: Step, steps: int) -> Turn:
        wall_s, cpu_s = clock()
        for _ in range(steps):
            step()
        wall_end_s, cpu_end_s = clock()
        return Turn((wall_end_s - wall_s) / steps, (cpu_end_s - cpu_s) / steps)

    quickest_s = min(min(turn(step, 1).wall_s for _ in range(2)) for step in sides.values())
    steps = max(1, round(turn_s / quickest_s))
    names, figures = list(sides), {name: list[Turn]() for name in sides}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(turn(sides[name], steps))
    return figures


def speedup(ours: Sequence[Turn], theirs: Sequence[Turn], *, cpu: bool = False) -> Spread:
    """Return how many times faster ours is, round by round: one round's machine state is shared."""
    place = 1 if cpu else 0
    return Spread.of([b[place] / a[place] for a, b in zip(ours, theirs, strict=True)])
