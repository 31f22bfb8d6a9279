"""Bytes of the messages between encoder ranks and language ranks, from the config of a model alone."""

# pyright: reportUnknownMemberType=false
# transformers leaves its configs untyped.

from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from offbeat.multimodal.rules import media_rules
from offbeat.trainers.grid.bridge import gradient_dtype


class BridgeBytes(NamedTuple):
    """Bytes of the values of messages, without their headers."""

    features: int
    gradients: int  # of these features; 0: the tower is frozen


def bridge_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, tokens: int, *, trains_tower: bool
) -> BridgeBytes:
    """Return the bytes of the messages for media of so many tokens.

    A feature is ``hidden size`` numbers of the model's dtype, and as many for each decoder layer that
    has features of its own. Gradients are sent in float32 at least.

    Args:
        config: Config of the model.
        dtype: Of the weights that passes compute with.
        tokens: Placeholders.
        trains_tower: Whether gradients are sent back.
    """
    hidden: int = config.get_text_config(decoder=True).hidden_size
    numbers = tokens * hidden * (1 + media_rules(config).deep_layers)
    back = gradient_dtype(dtype).itemsize if trains_tower else 0
    return BridgeBytes(numbers * dtype.itemsize, numbers * back)
