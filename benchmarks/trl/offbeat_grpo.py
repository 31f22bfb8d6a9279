r"""``offbeat train`` of a recipe with its metrics written as the step log ``compare.py`` reads.

    python benchmarks/trl/offbeat_grpo.py --steps 600 runs/bench/offbeat_4.json
    python benchmarks/trl/offbeat_grpo.py --recipe recipes/smollm2-addition.yaml --lr 2e-5 \
        --model models/smollm2-135m-instruct --max-new-tokens 24 --steps 15 runs/bench/smollm2.json \
        generator.backend=embedded model.dtype=float32

Real Ray actors, or one process with ``runtime.backend=local``: one engine and one trainer of one thread
each, beside the peer's two threads. Time counts from the begin of the first step, which waits for the
first rollouts; start-up is left out.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from offbeat.telemetry.records import read_metrics


def run(arguments: argparse.Namespace, run_dir: Path) -> None:
    """Run one training; the recipe's model, task, learning rate and batch unless overridden."""
    command = [
        *(sys.executable, "-m", "offbeat", "train", arguments.recipe),
        f"seed={arguments.seed}",
        f"steps={arguments.steps}",
        f"model.path={arguments.model.resolve()}",
        f"generator.sampling.max_new_tokens={arguments.max_new_tokens}",
        f"trainer.optimizer.learning_rate={arguments.lr}",
        "trainer.optimizer.schedule=constant",  # as the peer's
        "trainer.optimizer.warmup_steps=0",
        "algorithm.loss.clip_high=0.2",
        "wandb.mode=disabled",
        *("--run-dir", str(run_dir)),
        *arguments.overrides,
    ]
    subprocess.run(command, check=True)


def step_records(metrics_file: Path) -> list[dict[str, float]]:
    """The run's metrics in the form both sides share. ``t_s`` 0 is the begin of the first step."""
    steps = read_metrics(metrics_file)
    began_s = steps[0].time_s - steps[0].metrics["time/step_s"]
    records: list[dict[str, float]] = []
    for step in steps:
        metrics = step.metrics
        samples = round(metrics["throughput/samples_per_s"] * metrics["time/step_s"])
        records.append(
            {
                "t_s": round(step.time_s - began_s, 3),
                "reward": metrics["train/reward"],
                "samples": samples,
                "tokens": round(metrics["throughput/tokens_per_s"] * metrics["time/step_s"]),
                "completion_tokens": round(metrics["rollout/response_tokens_mean"] * samples),
                "cpu_s": sum(value for name, value in metrics.items() if name.startswith("cpu/")),
            }
        )
    return records


def main() -> None:
    """Train, write the records, print where."""
    parser = argparse.ArgumentParser(description="Measure offbeat on a recipe.")
    parser.add_argument("log", type=Path, help="JSON file to write")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--model", type=Path, default=Path("models/tiny-addition"))
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    run_dir = arguments.log.with_suffix(".run")
    run(arguments, run_dir)
    records = step_records(run_dir / "metrics.jsonl")
    arguments.log.write_text(json.dumps(records))
    print(f"{len(records)} steps in {records[-1]['t_s']:.1f} s: {arguments.log}")


if __name__ == "__main__":
    main()
