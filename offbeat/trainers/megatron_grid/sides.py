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
    if not architecture.media_rules.reads_media:
        problem = "reads no media, so that it has no tower to encode them"
        raise UntrainableModel(architecture.name, problem, "Leave trainer.encoder out")
    return architecture
