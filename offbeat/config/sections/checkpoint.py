"""Defines section ``checkpoint`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class CheckpointConfig(Config):
    """Checkpoints of the trainer's state, and the export of the model."""

    interval: Annotated[int, Field(ge=0)] = 100
    """Steps between two checkpoints of the trainer's state. A run that ends cleanly also saves its
    last step. 0: none; a lost trainer or a resumed run then starts over."""

    keep: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept on disk. Each is a whole trainer state."""

    final: bool = True
    """Write the trained model to `checkpoints/step_N` at the end, as a Hugging Face directory."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for writing a checkpoint."""
