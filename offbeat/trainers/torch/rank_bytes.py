"""Bytes that a rank holds of a model that tensor ranks divide and data ranks shard."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Collection, Iterable, Mapping
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from offbeat.models.plain import HALF
from offbeat.trainers.rank_bytes import RankBytes
from offbeat.trainers.torch.matrix_division import find_division
from offbeat.weight_sync.region import Shape

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
        UntrainableModel: So many tensor ranks cannot divide the model.
    """
    plan = find_division().plan(model, tensor) if tensor > 1 else {}
    still = {id(each) for each in frozen}
    weights = [(n, tuple(p.shape), id(p) not in still) for n, p in model.named_parameters()]
    buffers = sum(each.nbytes for each in model.buffers())
    return sharded_bytes(
        weights, buffers, dtype, data=data, tensor=tensor, plan=plan, references=references
    )


def sharded_bytes(
    weights: Iterable[tuple[str, Shape, bool]],
    buffers: int,
    dtype: torch.dtype,
    *,
    data: int,
    tensor: int,
    plan: Mapping[str, str],
    references: int = 0,
) -> RankBytes:
    """Return the bytes of the rank that holds most, as ``largest_rank`` does.

    Args:
        weights: Name and shape of each, and whether it is trained.
        buffers: Bytes of all buffers.
        dtype: Of the weights that passes compute with.
        data: Number of data-parallel ranks.
        tensor: Number of tensor-parallel ranks.
        plan: Kind of division by module name of the matrices that tensor ranks divide.
        references: Frozen copies of the model beside it.
    """
    division, trained, others = find_division() if plan else None, 0, 0
    for name, whole, is_trained in weights:
        shape = list(whole)
        axis = None if division is None else division.cut_axis(plan, name, len(whole))
        if axis is not None:
            shape[axis] = -(-shape[axis] // tensor)
        elements = -(-shape[0] // data) * prod(shape[1:])
        if is_trained:
            trained += elements
        else:
            others += elements
    wide = torch.float32.itemsize if dtype in HALF else dtype.itemsize
    held = trained * wide + others * dtype.itemsize + buffers
    copies = references * ((trained + others) * dtype.itemsize + buffers)
    return RankBytes(held + copies, trained * wide, trained * wide * _MOMENTS)


def whole_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Return the bytes of the whole model, which the first rank loads before it is sharded."""
    elements = sum(each.numel() for each in model.parameters())
    return elements * dtype.itemsize + sum(each.nbytes for each in model.buffers())
