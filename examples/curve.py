"""Print the learning curve of a run from its journal: ``python examples/curve.py RUN_DIR``."""

import sys
from pathlib import Path
from statistics import fmean

import offbeat
from offbeat.controller.events import StepApplied

ROWS, WIDTH = 15, 40


def main(run_dir: str) -> None:
    """Print the mean reward of up to ``ROWS`` stretches of steps of equal length."""
    steps = [event for event in offbeat.read_events(run_dir) if isinstance(event, StepApplied)]
    length = max(1, -(-len(steps) // ROWS))
    print(f"reward of {Path(run_dir).name}")
    for start in range(0, len(steps), length):
        stretch = steps[start : start + length]
        reward = fmean(step.reward for step in stretch)
        print(f"steps {start + 1:>4} to {start + len(stretch):<4} {reward:6.3f} {bar(reward)}")


def bar(reward: float) -> str:
    """Return a bar whose full width is a reward of 1."""
    return "█" * round(WIDTH * min(max(reward, 0.0), 1.0))


if __name__ == "__main__":
    main(sys.argv[1])
