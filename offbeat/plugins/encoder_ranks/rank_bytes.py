"""Bytes that a rank of either side holds throughout a step, from the inventory of a model alone."""

# pyright: reportUnknownMemberType=false
# transformers leaves its configs untyped.

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from offbeat.models.media_rules import media_rules
from offbeat.plugins.encoder_ranks.bridge import gradient_dtype
from offbeat.plugins.encoder_ranks.layout import Grid
from offbeat.plugins.encoder_ranks.sides import Inventory
from offbeat.trainers.rank_bytes import RankBytes
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.rank_bytes import sharded_bytes

_WHOLE: Mapping[str, str] = MappingProxyType({})


def largest_of_side(
    inventory: Inventory,
    grid: Grid,
    side: Side,
    dtype: torch.dtype,
    *,
    references: int = 0,
    plan: Mapping[str, str] = _WHOLE,
) -> RankBytes:
    """Return the bytes of the rank that holds most of a side, which is its first one.

    A trained weight of 16 bits is kept in float32, which is its master, as ``ShardedWeights`` does;
    one that is frozen keeps its 16 bits. Buffers are whole on every rank. What a pass gathers,
    computes and exchanges comes on top.

    Args:
        inventory: Tensors of the whole model; which of them are trained.
        grid: The ranks.
        side: Which of them.
        dtype: Of the weights that passes compute with.
        references: Frozen copies of the model beside it.
        plan: Kind of division by module name of the side's matrices, where its ranks divide any.
    """
    tensor = grid.tensor_ranks_of(side)
    buffers = {each.name: each for each in inventory.buffers if each.side is side}
    trained = {name for name, each in inventory.trained if each is side}
    return sharded_bytes(
        (
            (each.name, each.shape, each.name in trained)
            for each in inventory.weights
            if each.side is side and each.name not in buffers
        ),
        sum(prod(each.shape) * each.dtype.itemsize for each in buffers.values()),
        dtype,
        data=len(grid.ranks_of(side)) // tensor,
        tensor=tensor,
        plan=plan,
        references=references,
    )


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
