"""What a limit of memory changes in a sweep: seconds per step, and how far peaks differ between rounds.

    python -m benchmarks.sweep_limit recipes/quickstart.yaml --memory-mib 8000 --rounds 5

Measures the recipe's point with and without ``--memory-mib`` in turn, so that a load of the machine falls on
both. Prints of each the median seconds per step and the lowest and highest ``peak_mib``; and the median, over
rounds, of the seconds with the limit over those without. The limit should be one that the point fits into.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from offbeat.plugins.planning.fabricated import LengthLaw
from offbeat.plugins.planning.sweep import SweepRequest, measure
from offbeat.plugins.planning.sweep_points import SweepPoint


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parser.add_argument("--memory-mib", type=int, default=8000)
    parser.add_argument("--lengths", default="", help="as of offbeat sweep")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    free = SweepRequest(
        given.recipe,
        tuple(given.overrides),
        over=(),
        law=LengthLaw.parse(given.lengths),
        steps=given.steps,
        memory_mib=None,
        deadline_s=600.0,
        largest=False,
    )
    requests = {"free": free, "limited": replace(free, memory_mib=given.memory_mib)}
    points: dict[str, list[SweepPoint]] = {name: [] for name in requests}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(given.rounds):
            for name, request in requests.items():
                point = measure(request, (), Path(directory) / "log")
                if point.outcome != "ok":
                    raise SystemExit(f"{name}: {point.outcome}: {point.detail}")
                points[name].append(point)
    for name, measured in points.items():
        peaks = [each.peak_mib for each in measured]
        seconds = statistics.median(each.step_s for each in measured)
        print(f"{name:8} {seconds:8.3f} s/step   peak {min(peaks):,.1f} to {max(peaks):,.1f} MiB")
    rounds = zip(points["free"], points["limited"], strict=True)
    ratio = statistics.median(limited.step_s / free.step_s for free, limited in rounds)
    print(f"limited over free, median of {given.rounds} rounds: {ratio:.2f}")


if __name__ == "__main__":
    main()
