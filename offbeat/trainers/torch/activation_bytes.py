"""Memory that a microbatch needs in addition to weights and gradients, without allocating it.

torch runs the trainer's own forward and backward pass on tensors without memory
(``FakeTensorMode``) and counts the live memory (``MemTracker``). So recomputed layers, a chunked
head and every model family are counted in the way that they are computed, and none needs a formula.

Also computes the bytes of a model that a rank holds if tensor ranks divide the model and data ranks
shard it.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.
# torch declares some functions without types.

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import PreTrainedConfig, PreTrainedModel

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.models.loading import find_auto_class
from offbeat.models.plain import HALF, attend_by
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.flops import model_flops
from offbeat.trainers.torch.forward import compute_packed_logprobs_and_entropies
from offbeat.trainers.torch.matrix_division import find_division
from offbeat.trainers.torch.model import (
    call_to_pair_ratio,
    linear_to_pair_ratio,
    recompute_layers,
    vocabulary,
)
from offbeat.trainers.torch.proof import RowProof
from offbeat.trainers.torch.routing import find_routers
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.transfer_queue.schema import Columns
from offbeat.weight_sync.region import Shape

_COUNTED_APART: Final = ("PARAM", "BUFFER", "GRAD")
_FEW_LAYERS: Final = (1, 2)
"""Layer counts of the measured models. Memory is linear in it, and a measurement takes seconds."""


def activation_bytes(
    config: PreTrainedConfig,
    groups: Sequence[Columns],
    trainer: TorchTrainerConfig,
    dtype: torch.dtype,
    proof: RowProof,
) -> tuple[int, tuple[int, int]] | None:
    """Return the bytes of the largest microbatch of the groups, its rows, and tokens per row.

    The bytes are the peak of live memory in the forward and backward pass, on one rank, while the
    gradients of all weights exist. The result is None if the model has experts, if a pass depends
    on tensor values, or if the model's layers cannot be recomputed.
    """
    with torch.device("meta"):
        shell = find_auto_class(config).from_config(config)
    if model_flops(shell) is None or find_routers(shell):
        return None
    layers = config.get_text_config(decoder=True).num_hidden_layers
    try:
        measured = [
            _measure(_shorten(config, few), groups, trainer, dtype, proof)
            for few in sorted({min(each, layers) for each in _FEW_LAYERS})
        ]
    except (DataDependentOutputException, DynamicOutputShapeException, UntrainableModel):
        return None
    (first, shape), (last, _) = measured[0], measured[-1]
    return first + (layers - 1) * (last - first), shape


def _shorten(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    short = type(config).from_dict(config.to_dict())
    text = short.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return short


def _measure(
    config: PreTrainedConfig,
    groups: Sequence[Columns],
    trainer: TorchTrainerConfig,
    dtype: torch.dtype,
    proof: RowProof,
) -> tuple[int, tuple[int, int]]:
    tracker = MemTracker()
    # The inputs of a microbatch are allocated. They are small.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = find_auto_class(config).from_config(config, dtype=dtype)
        attend_by(model, proof.attention)
        if trainer.activation_checkpointing:
            recompute_layers(model)
        packed = largest_microbatch(model, groups, trainer, proof)
        tracker.track_external(model)
        with tracker:
            for each in model.parameters():
                each.grad = torch.zeros_like(each)
            logprobs_N, entropy_N = compute_packed_logprobs_and_entropies(
                model, packed, 1.0, plain_head=proof.plain_head
            )
            (logprobs_N.sum() + entropy_N.sum()).backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    held = sum(value for kind, value in peak.items() if _name(kind) in _COUNTED_APART)
    rows, tokens = packed.input_ids_RT.shape
    return peak["Total"] - held, (rows, tokens)


def largest_microbatch(
    model: PreTrainedModel,
    groups: Sequence[Columns],
    trainer: TorchTrainerConfig,
    proof: RowProof,
) -> PackedRows:
    """Return the microbatch of the groups with the most tokens, padding included."""
    planner = MicrobatchPlanner(
        trainer.max_tokens_per_microbatch,
        proof.shared_prompt,
        linear_to_pair_ratio(model),
        vocabulary(model),
        call_pairs=call_to_pair_ratio(model) if proof.split else None,
    )
    _, microbatches = planner.cut(groups, only_trained=True)
    return max(microbatches, key=lambda each: each.input_ids_RT.size)


def _name(kind: object) -> str:
    return str(kind).rpartition(".")[2]


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

    A trained 16-bit weight is kept as a float32 master. A frozen weight stays in 16 bits. Buffers
    are whole on every rank. The weights that a pass gathers and the tensors that it computes are
    not included.

    Args:
        model: The whole model. It may have no memory for its weights.
        dtype: Dtype of the weights in passes.
        data: Number of data-parallel ranks.
        tensor: Number of tensor-parallel ranks. With 1, the model needs no division plan.
        frozen: Parameters that are not trained.
        references: Number of frozen copies in addition to the model.

    Raises:
        UntrainableModel: The model cannot be divided over so many tensor ranks.
    """
    plan = find_division().plan(model, tensor) if tensor > 1 else {}
    still = {id(each) for each in frozen}
    weights = [(n, tuple(p.shape), id(p) not in still) for n, p in model.named_parameters()]
    buffers = sum(each.nbytes for each in model.buffers())
    return count_sharded_bytes(
        weights, buffers, dtype, data=data, tensor=tensor, plan=plan, references=references
    )


def count_sharded_bytes(
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
        weights: Name and shape of each weight, and whether it is trained.
        buffers: Bytes of all buffers.
        dtype: Dtype of the weights in passes.
        data: Number of data-parallel ranks.
        tensor: Number of tensor-parallel ranks.
        plan: Kind of division by module name, for matrices that tensor ranks divide.
        references: Number of frozen copies in addition to the model.
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
