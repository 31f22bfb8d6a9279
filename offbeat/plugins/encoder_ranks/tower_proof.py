"""Startup proof of a tower cut over encoder ranks: features, and gradients of undivided weights."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.models.media_rules import MediaRules
from offbeat.models.plain import TOLERANCES
from offbeat.plugins.tensor_ranks.tensor_proof import copies_gap
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.sharding import RankMesh, class_name, settle

NOT_APART: Final = (0.0, "")


def example(rules: MediaRules) -> Media:
    """Return media of noise for a pass without prompts."""
    return rules.example(np.random.default_rng(0))


def stack_features(made: tuple[Tensor, tuple[Tensor, ...]]) -> Tensor:
    """Stack features and the features of deeper layers as one tensor [blocks, F, H]."""
    embedded_FH, deep = made
    return torch.stack([embedded_FH, *deep])


@torch.no_grad()
def example_features(model: PreTrainedModel, rules: MediaRules) -> Tensor:
    """Return a model's features [blocks, F, H] of an example."""
    return stack_features(rules.encode(model, (example(rules),)))


def prove_tower(
    model: PreTrainedModel, rules: MediaRules, want: Tensor, dtype: torch.dtype, mesh: RankMesh
) -> tuple[float, str]:
    """Prove that a cut tower computes the whole tower's features. Return a ``copies_gap`` result.

    All ranks of the mesh must call it together, before the optimizer exists. It leaves no gradient.

    Args:
        model: The tower, cut over the ranks.
        rules: Media rules of the model.
        want: ``example_features`` of the whole tower.
        dtype: Dtype of the weights in passes.
        mesh: The encoder ranks.

    Raises:
        UntrainableModel: The features differ.
    """
    with torch.set_grad_enabled(mesh.tensor is not None):
        made = stack_features(rules.encode(model, (example(rules),)))
    apart = NOT_APART
    if mesh.tensor is not None and made.requires_grad:
        apart = copies_gap(model, made.square().sum(), mesh)
    settle(model)
    _check_features(class_name(model), made.detach().double(), want.double(), TOLERANCES[dtype])
    return apart


def _check_features(model: str, got: Tensor, want: Tensor, allowed: float) -> None:
    is_shaped = got.shape == want.shape
    gap = float((got - want).abs().max() / want.abs().max()) if is_shaped else float("inf")
    if not gap <= allowed:
        problem = (
            f"computes features of an example {gap:.2g} of the largest off on encoder ranks, more than "
            f"{allowed:g}"
        )
        raise UntrainableModel(model, problem, "Leave trainer.encoder out")
