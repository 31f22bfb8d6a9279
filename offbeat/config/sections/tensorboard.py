"""Defines section ``tensorboard`` of a recipe."""

from typing import Literal

from offbeat.config.base import Config


class TensorBoardConfig(Config):
    """TensorBoard, one sink beside ``metrics.jsonl``: a file of events, no server."""

    enabled: bool = False
    """Write `tensorboard/` into the run directory while the run goes on; needs the extra `tensorboard`. Off saves
    a fraction of a millisecond per step and 2 kB of disk; `offbeat export` writes the same afterwards."""

    x_axis: Literal["steps", "samples"] = "steps"
    """Unit of TensorBoard's step axis. samples (`groups_per_step` times `samples_per_group` per step) lays runs of
    different batch sizes over one another; steps matches logs and checkpoints."""
