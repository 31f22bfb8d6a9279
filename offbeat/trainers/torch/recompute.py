"""Activation checkpointing: layers keep only their input, and are computed again in backward.

transformers supports this only for a model in training mode. Here the model is in evaluation mode,
without randomness, so that option would silently have no effect. Only the layer's ``forward`` is
repeated: the hooks of FSDP2 before and after a layer run once per pass.
"""

# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.model import decoder_layers


def recompute_layers(model: PreTrainedModel) -> None:
    """Recompute every decoder layer in backward. Call it once, before the model is sharded.

    Names, weights and values stay as they are.

    Raises:
        UntrainableModel: The model does not declare which modules are its layers.
    """
    layers = decoder_layers(model)
    if not layers:
        fix = "Set trainer.activation_checkpointing to false"
        raise UntrainableModel(type(model).__name__, "names no class of decoder layers", fix)
    for layer in layers:
        _repeat(layer)


def _repeat(layer: nn.Module) -> None:
    once: Callable[..., Any] = layer.forward

    @functools.wraps(once)
    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- whatever the layer takes and gives
        if not torch.is_grad_enabled():
            return once(*args, **kwargs)
        return checkpoint(once, *args, use_reentrant=False, **kwargs)

    layer.forward = forward
