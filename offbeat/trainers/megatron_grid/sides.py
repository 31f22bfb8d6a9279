"""Reads what the ranks of both sides hold of a model."""

from pathlib import Path

from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.megatron.architecture import Architecture, read_architecture


def architecture_with_tower(path: str | Path) -> Architecture:
    """Return the architecture of a model whose tower can be held apart.

    Raises:
        UntrainableModel: It has no tower, or the trainer has no mapping for it.
    """
    architecture = read_architecture(path)
    if architecture.picture_rules is None:
        problem = "reads no pictures, so that it has no vision tower"
        raise UntrainableModel(architecture.name, problem, "Leave trainer.encoder out")
    return architecture
