"""Tensor parallelism of a transformers model: matrices that several ranks divide among themselves.

Which matrices, and how, is what the model's own config says (``base_model_tp_plan``). A model without
such a plan, or with a plan of other kinds, is refused by name. What the plan leaves out is whole on
every rank: embedding, output head, and norms of the hidden state. An adapter is divided with its
matrix: of one that is divided by columns the matrix B, of one divided by rows the matrix A.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs untyped.

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate, chain, islice
from math import gcd
from typing import Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from offbeat.multimodal.picture_rules import picture_rules
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.lora import base_of, side_of

COLUMNS: Final = "colwise"
ROWS: Final = "rowwise"
HEADS: Final = "replicated_with_grad_allreduce"
_KINDS: Final = (COLUMNS, ROWS, HEADS)
_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of configs with layers of experts, which a plan may leave out: they would be whole on each rank."""

_HEADS_AXIS: Final = 2
"""Axis of the heads in what norms of queries and keys read, [R, T, heads, D].

Where a model swaps it with the tokens nothing changes: a norm reduces the last axis only.
"""
_FIX: Final = "Set trainer.tensor_parallel to 1"


def tensor_plan(model: PreTrainedModel, ranks: int) -> dict[str, str]:
    """Return the kind of division by module name. Reads names and sizes only: no memory is needed.

    ``COLUMNS`` divides the outputs of a matrix, ``ROWS`` its inputs; ``HEADS`` is a norm of queries or
    keys, whole on every rank, each of which has the gradient of its own heads.

    Raises:
        UntrainableModel: The model has no plan, one of other kinds, or sizes that ``ranks`` do not
            divide.
    """
    name = type(model).__name__
    for problem in chain(_problems(model), _left_out(model)):
        raise UntrainableModel(name, f"cannot be divided over tensor ranks: {problem}", _FIX)
    kinds = dict(_parts(model))
    sizes = list(_sizes(model, kinds))
    common = gcd(*(count for _, count in sizes))
    for what, count in sizes:
        if count % ranks:
            problem = f"has {count} {what}, which trainer.tensor_parallel={ranks} does not divide"
            fitting = ", ".join(str(each) for each in range(1, common + 1) if not common % each)
            raise UntrainableModel(
                name, problem, f"Set trainer.tensor_parallel to one of {fitting}"
            )
    return kinds


def cut_axis(plan: Mapping[str, str], weight: str, axes: int) -> int | None:
    """Return the axis along which tensor ranks divide a weight or bias; None: each has it whole."""
    kind = plan.get(weight.rpartition(".")[0])
    if kind == COLUMNS:
        return 0
    return 1 if kind == ROWS and axes > 1 else None


def divide(model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Divide the matrices of a plan over the ranks of a mesh, in place. All of its ranks call it.

    Divided matrices become DTensors. What goes into a pair of them, and what comes out, is whole and
    equal on all ranks, as is its gradient. Call it before the model is sharded over data ranks.

    Args:
        model: Its weights are without memory, or whole and equal on all ranks.
        mesh: The tensor ranks.
        plan: Of ``tensor_plan``.
    """
    is_trained = {name: each.requires_grad for name, each in model.named_parameters()}
    parallelize_module(
        model, mesh, {name: _style(kind) for name, kind in plan.items()}, src_data_rank=None
    )
    for name, each in model.named_parameters():
        each.requires_grad_(is_trained[name])  # torch's style of norms makes trained parameters


def _style(kind: str) -> ParallelStyle:
    if kind == COLUMNS:
        return ColwiseParallel()
    if kind == ROWS:
        return RowwiseParallel()
    return SequenceParallel(sequence_dim=_HEADS_AXIS, use_local_output=True)


def _problems(model: PreTrainedModel) -> Iterator[str]:
    """Yield why no number of ranks divides a model; nothing if some do."""
    if picture_rules(model.config) is not None:
        yield "it reads pictures, and no rule divides its vision tower"
    config = model.config.get_text_config(decoder=True)
    for key in _EXPERTS:
        if count := getattr(config, key, None):
            yield f"its config has {key}={count}, and experts are not divided"
    plan = _plan(model)
    if not plan:
        yield "its config has no base_model_tp_plan"
    for pattern, kind in plan.items():
        if kind not in _KINDS:
            yield f"base_model_tp_plan has {kind} for {pattern}, and {', '.join(_KINDS)} are known"
        modules = [name for name, _ in model.named_modules() if _is_named(model, name, pattern)]
        if not modules:
            yield f"base_model_tp_plan has {pattern}, and no module is named so"
        for each in modules:
            matrix = model.get_submodule(base_of(model, each))
            if kind != HEADS and not isinstance(matrix, nn.Linear):
                yield f"{each}, which base_model_tp_plan divides, is not a linear layer"


def _left_out(model: PreTrainedModel) -> Iterator[str]:
    """Yield what a plan leaves out inside an attention or feed-forward layer that it divides."""
    named = {name for name, _ in _divided(model)}
    around = {name.rpartition(".")[0] for name in named}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        within = list(accumulate(module.split("."), "{}.{}".format))
        # A decoder layer, whose name is a number, has norms of the hidden state, which is whole.
        is_beside = any(each in around and not each.rpartition(".")[2].isdigit() for each in within)
        if is_beside and named.isdisjoint(within):
            yield f"{name} reads what base_model_tp_plan divides beside it, and is not in that plan"


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the kinds by pattern that the config names, without the embedding, which stays whole."""
    plan: dict[str, str] = model.config.base_model_tp_plan or {}
    embedding = model.get_input_embeddings()
    (name,) = (name for name, each in model.named_modules() if each is embedding)
    return {pattern: kind for pattern, kind in plan.items() if not _is_named(model, name, pattern)}


def _divided(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield name and kind of the modules that the plan names, in the order of the model."""
    plan = _plan(model)
    for name, _ in model.named_modules():
        kinds = (kind for pattern, kind in plan.items() if _is_named(model, name, pattern))
        for kind in islice(kinds, 1):
            yield name, kind


def _parts(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield name and kind of what is divided: a module of the plan, or matrix and adapter of one."""
    for name, kind in _divided(model):
        base = base_of(model, name)
        yield base, kind
        if base != name:
            yield side_of(name, "B" if kind == COLUMNS else "A"), kind


def _is_named(model: PreTrainedModel, name: str, pattern: str) -> bool:
    """Return whether a module has a name of the plan, whose ``*`` is the index of a layer."""
    within = name.removeprefix(f"{model.base_model_prefix}.")
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), within) is not None


def _sizes(model: PreTrainedModel, kinds: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield what every rank has to have an equal part of, and how many there are."""
    config = model.config.get_text_config(decoder=True)
    heads: int = config.num_attention_heads
    yield "attention heads", heads
    yield "key-value heads", getattr(config, "num_key_value_heads", None) or heads
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) and kind != HEADS:
            wide = module.out_features if kind == COLUMNS else module.in_features
            yield f"{'columns' if kind == COLUMNS else 'rows'} in {name}", wide
