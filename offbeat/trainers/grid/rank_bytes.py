"""Bytes that a rank of either side holds throughout a step, from the inventory of a model alone."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

import torch

from offbeat.model_proof.plain import HALF
from offbeat.trainers.grid.layout import Grid, Side
from offbeat.trainers.grid.sides import Inventory
from offbeat.trainers.rank_bytes import RankBytes
from offbeat.trainers.torch.tensor_parallel import cut_axis

_MOMENTS = 2
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
    data = len(grid.ranks_of(side)) // tensor
    buffers = {each.name: each for each in inventory.buffers if each.side is side}
    whole = sum(prod(each.shape) * each.dtype.itemsize for each in buffers.values())
    trained_names = {name for name, each in inventory.trained if each is side}
    trained = frozen = 0
    for each in inventory.weights:
        if each.side is not side or each.name in buffers:
            continue
        shape = list(each.shape)
        if (axis := cut_axis(plan, each.name, len(shape))) is not None:
            shape[axis] = -(-shape[axis] // tensor)
        elements = -(-shape[0] // data) * prod(shape[1:])
        if each.name in trained_names:
            trained += elements
        else:
            frozen += elements
    wide = torch.float32.itemsize if dtype in HALF else dtype.itemsize
    held = trained * wide + frozen * dtype.itemsize + whole
    copies = references * ((trained + frozen) * dtype.itemsize + whole)
    return RankBytes(held + copies, trained * wide, trained * wide * _MOMENTS)
