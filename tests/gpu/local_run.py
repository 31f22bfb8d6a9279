"""Overrides and commands of runs in one process on the device under test."""

from pathlib import Path
from typing import Final

from tests.support.live_run import LiveRun

ROOT: Final = Path(__file__).parents[2]
QUICKSTART: Final = ROOT / "recipes" / "quickstart.yaml"
ALWAYS: Final = ("wandb.mode=disabled", "rollout.log=false")
"""A run with these needs neither W&B nor pyarrow."""


def on_device(device: str) -> list[str]:
    """Return the overrides that put trainer and engine on a device."""
    overrides = [f"trainer.device={device}", f"generator.device={device}", *ALWAYS]
    if device != "cpu":
        overrides += ["trainer.gpus=0.5", "generator.gpus=0.5"]
    return overrides


def start(recipe: Path, run_dir: Path, device: str, *overrides: str) -> LiveRun:
    """Start ``offbeat train RECIPE --local`` on a device."""
    arguments = ["train", str(recipe), "--local", *on_device(device), *overrides]
    return LiveRun(arguments, run_dir=run_dir, cwd=run_dir.parent, is_alone=True)


def resume(run_dir: Path) -> LiveRun:
    """Start ``offbeat train --resume RUN_DIR``."""
    arguments = ["train", "--resume", str(run_dir)]
    return LiveRun(arguments, run_dir=run_dir, cwd=run_dir.parent, is_alone=True)
