"""Defines section ``tensorboard`` of a recipe."""

from typing import Literal

from offbeat.config.base import Config


class TensorBoardConfig(Config):
    """TensorBoard, in addition to ``metrics.jsonl``: a file of events, no server."""

    enabled: bool = False
    """Write `tensorboard/` in the run directory during the run (extra `tensorboard`). `offbeat
    export` writes the same afterwards."""

    x_axis: Literal["steps", "samples"] = "steps"
    """Unit of the step axis. samples (`groups_per_step` times `samples_per_group` per step) aligns
    runs with different batch sizes."""
