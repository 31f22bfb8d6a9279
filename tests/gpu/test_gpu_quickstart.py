"""The quickstart on the device, in one process, until its reward reaches 0.9."""

import statistics
import time
from pathlib import Path
from typing import Final

from offbeat.telemetry.records import read_metrics
from tests.gpu.conftest import Measured
from tests.gpu.local_run import QUICKSTART, start
from tests.support.run_records import RunRecords

REWARD: Final = 0.9
STEPS: Final = 20  # of the mean
WITHIN_S: Final = 170.0


def mean_reward(run_dir: Path) -> float:
    """Return the mean reward of the last steps; 0 before there are enough."""
    path = run_dir / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    if len(records) < STEPS:
        return 0.0
    return statistics.mean(each.metrics["train/reward"] for each in records[-STEPS:])


def test_the_quickstart_reaches_its_reward(
    run_root: Path, device: str, curve: Path, measured: Measured
) -> None:
    run_dir, began = run_root / "quickstart", time.time()
    with start(QUICKSTART, run_dir, device) as run:
        run.until(
            f"a mean reward of {REWARD} over {STEPS} steps",
            lambda: mean_reward(run_dir) >= REWARD,
            within_s=WITHIN_S,
        )
        reached_s = run.wall_s
        run.stop()
        assert run.exit_code() == 0
        run.nothing_is_left()
    records = read_metrics(run_dir / "metrics.jsonl")
    curve.write_bytes((run_dir / "metrics.jsonl").read_bytes())
    RunRecords.read(run_dir).agree()
    how = "quickstart, 16 groups of 16 samples, float32, one process"
    measured("command to the end of the first step", records[0].time_s - began, "s", how)
    measured(
        f"command to a mean reward of {REWARD}", reached_s, "s", f"{how}, {len(records)} steps"
    )
    for name, unit in (
        ("time/step_s", "s"),
        ("throughput/samples_per_s", "samples/s"),
        ("throughput/tokens_per_s", "tokens/s"),
        ("sync/pause_s", "s"),
    ):
        values = [each.metrics[name] for each in records[5:] if name in each.metrics]
        measured(f"{name}, median", statistics.median(values), unit, how)
