"""Defines section ``checkpoint`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class CheckpointConfig(Config):
    """Checkpoints: the model that is kept, and the state that a lost trainer goes back to."""

    interval: Annotated[int, Field(ge=0)] = 100
    """Steps between two checkpoints of the trainer's whole state; 0: none, a lost trainer
    starts over. Few steps lose less work with a trainer, many spend less time and disk on
    writing; a run that ends in order keeps one of its last step."""

    keep: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept on disk, newest first. More let you go back further, at a whole trainer
    state of disk each."""

    final: bool = True
    """Write the trained model to ``checkpoints/step_N`` at the end, as a Hugging Face
    directory. Off saves its time and disk where only the metrics are of interest."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Time writing it may take. Raise it for large models on slow disks; a disk that hangs is
    noticed later."""
