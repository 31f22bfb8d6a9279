"""Draws the reward of a run over its seconds."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# matplotlib may not be installed.

from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

from offbeat.telemetry.records import read_metrics


def draw_curve(metrics: Path, picture: Path, device: str) -> str:
    """Draw mean rewards of 20 steps as a PNG; return why not, or an empty string.

    Args:
        metrics: ``metrics.jsonl`` of a run.
        picture: The PNG to write.
        device: Name of the device, for the title.
    """
    records = [each for each in read_metrics(metrics) if "train/reward" in each.metrics]
    if not records:
        return f"{metrics} has no step, so there is no curve"
    if find_spec("matplotlib") is None:
        return f"matplotlib is not installed, so {picture.name} was not drawn; {metrics} has its values"
    from matplotlib.figure import Figure  # noqa: PLC0415 -- may not be installed

    began_s = records[0].time_s - records[0].metrics["time/step_s"]
    sums = [0.0, *accumulate(each.metrics["train/reward"] for each in records)]
    means = [(sums[i + 1] - sums[max(0, i - 19)]) / min(i + 1, 20) for i in range(len(records))]
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([each.time_s - began_s for each in records], means)
    axes.set(xlabel="seconds since the first step", ylabel="reward, mean of 20 steps", ylim=(0, 1))
    axes.set_title(f"recipes/quickstart.yaml in one process, {device}")
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=150)
    return ""
