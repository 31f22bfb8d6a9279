"""Bytes that a rank holds of a model that tensor ranks divide and data ranks shard."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Collection
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from offbeat.model_proof.plain import HALF
from offbeat.trainers.rank_bytes import RankBytes
from offbeat.trainers.torch.tensor_parallel import cut_axis, tensor_plan

_MOMENTS = 2


def largest_rank(
    model: PreTrainedModel,
    dtype: torch.dtype,
    *,
    data: int,
    tensor: int,
    frozen: Collection[nn.Parameter] = (),
    references: int = 0,
) -> RankBytes:
    """Return the bytes of the rank that holds most, which is the first one.

    A trained weight of 16 bits is kept in float32, which is its master; a frozen one keeps its 16
    bits. Buffers are whole on every rank. What a pass gathers and computes comes on top.

    Args:
        model: The whole model; it may be without memory.
        dtype: Of the weights that passes compute with.
        data: Number of data-parallel ranks.
        tensor: Number of tensor-parallel ranks; one needs no plan of the model.
        frozen: Parameters that are not trained.
        references: Frozen copies of the model beside it.

    Raises:
        UntrainableModel: ``tensor_plan`` refuses the model.
    """
    plan = tensor_plan(model, tensor) if tensor > 1 else {}
    still = {id(each) for each in frozen}
    trained = others = 0
    for name, each in model.named_parameters():
        shape, axis = list(each.shape), cut_axis(plan, name, each.ndim)
        if axis is not None:
            shape[axis] = -(-shape[axis] // tensor)
        elements = -(-shape[0] // data) * prod(shape[1:])
        if id(each) in still:
            others += elements
        else:
            trained += elements
    wide = torch.float32.itemsize if dtype in HALF else dtype.itemsize
    buffers = sum(each.nbytes for each in model.buffers())
    held = trained * wide + others * dtype.itemsize + buffers
    copies = references * ((trained + others) * dtype.itemsize + buffers)
    return RankBytes(held + copies, trained * wide, trained * wide * _MOMENTS)


def whole_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Return the bytes of the whole model, which the first rank loads before it is sharded."""
    elements = sum(each.numel() for each in model.parameters())
    return elements * dtype.itemsize + sum(each.nbytes for each in model.buffers())
