"""The quickstart for several seeds, judged by what it wrote.

    python benchmarks/quickstart.py --seeds 0,1,2 [--json FILE] [KEY=VALUE ...]

``command_s`` is the whole command, Ray and model loading included; ``first_step_s`` counts from the
start of the command to the end of the first optimizer step. Rewards are means over the first and
the last 20 steps; ``stale`` is the share of samples trained at staleness 1 or more.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from offbeat.telemetry.records import read_metrics
from offbeat.telemetry.summary import Summary


def run(seed: int, overrides: list[str], run_dir: Path) -> dict[str, float]:
    """Return the figures of one run."""
    command = [sys.executable, "-m", "offbeat", "train", "recipes/quickstart.yaml", f"seed={seed}"]
    began, wall_began = time.monotonic(), time.time()
    subprocess.run(
        [*command, *overrides, "--run-dir", str(run_dir)], check=True, stdout=subprocess.DEVNULL
    )
    command_s = time.monotonic() - began
    summary = Summary.from_json((run_dir / "summary.json").read_bytes())
    first = read_metrics(run_dir / "metrics.jsonl")[0]
    samples = sum(summary.staleness_histogram.values())
    return {
        "seed": seed,
        "reward_first": summary.reward_first or 0.0,
        "reward_last": summary.reward_last or 0.0,
        "steps": summary.steps,
        "command_s": command_s,
        "first_step_s": first.time_s - wall_began,
        "samples_per_s": summary.samples_per_s,
        "trainer_busy": summary.trainer_busy_fraction,
        "generator_busy": summary.generator_busy_fraction,
        "stale": 1 - summary.staleness_histogram.get(0, 0) / samples,
        "max_staleness": summary.max_staleness_trained,
        "trained": summary.groups.trained,
        "drawn": summary.groups.drawn,
    }


def main() -> None:
    """Run every seed in turn and print a table."""
    parser = argparse.ArgumentParser(description="The quickstart for several seeds.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            run(seed, arguments.overrides, Path(scratch) / f"seed-{seed}")
            for seed in map(int, arguments.seeds.split(","))
        ]
    print(" ".join(f"{name:>14}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:>14.4g}" for value in row.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
