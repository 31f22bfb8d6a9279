"""Maps the elements of megatron parameters to Hugging Face's tensors. Pure.

A parameter of one rank is a few boxes of a few Hugging Face tensors: a slice of rows, a slice of
columns, or rows of some key-value groups. Loading, export, checkpoints, digests and weight
sync all use the same boxes, so they cannot disagree. A state written under one layout can
be read under another.

    direct      every rank holds the whole tensor              norms, routers and their biases, gates
                                                               of shared experts
    row         columns are sharded over tensor-parallel ranks output of attention, of the MLP
    gated       gate's rows, then up's rows                    input of a gated MLP
    qkv         for each key-value group: its queries' rows, its key's, its value's; these rows are
                sharded evenly, within a group and a head if there are more ranks than groups
    vocabulary  rows are sharded; rows behind the vocabulary are padding without a counterpart
    expert      one of the above, for an expert of an expert-parallel rank, over expert-tensor ranks
    tower       as direct: the first stage holds the whole vision tower under its own names
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.errors import UnmappedParameter
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.weight_sync.region import Region, Shape


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A region of a Hugging Face tensor that a local parameter holds."""

    tensor: str  # Hugging Face name
    whole: Shape  # of that tensor
    region: Region  # of the tensor
    parameter: str  # local name
    local: Region  # of the parameter; of the same shape

    @property
    def key(self) -> tuple[str, Region]:
        """Return a key that is equal for copies of the same box on several ranks."""
        return self.tensor, self.region


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One of equal parts of a matrix."""

    index: int
    of: int  # number of parts


Rule = Callable[[Shape], list[TensorBox]]
"""Local shape -> boxes."""


def make_boxes(
    parameters: Mapping[str, Shape], architecture: Architecture, layout: ParallelLayout
) -> list[TensorBox]:
    """Return the boxes of one rank's parameters, in the order of the parameters.

    Raises:
        UnmappedParameter: No rule knows the name, or the boxes do not cover the parameter.
    """
    boxes = list[TensorBox]()
    for name, shape in parameters.items():
        found = _rule(name, architecture, layout)(shape)
        covered = sum(box.region.elements for box in found)
        padding = _padding(name, shape, architecture, layout)
        if covered + padding != prod(shape):
            problem = f"of shape {shape} has {prod(shape)} elements, {covered} of them mapped"
            raise UnmappedParameter(name, problem)
        boxes.extend(found)
    return boxes


def is_router_bias(tensor: str) -> bool:
    """Return whether a Hugging Face name belongs to a bias by which experts are chosen."""
    return tensor.endswith(_BIAS)


def pad_vocabulary(architecture: Architecture, layout: ParallelLayout) -> int:
    """Return the rows of the embedding over all ranks, padded to an equal number on each."""
    ranks = layout.grid.tensor
    return -(-architecture.vocabulary // ranks) * ranks


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_BIAS: Final = "e_score_correction_bias"
ROUTER_BIAS: Final = "mlp.router.expert_bias"
"""End of the library's name of a bias that selects experts (a float32 buffer, no parameter)."""

TOWER: Final = "tower."
"""Start of the names of a vision tower's parameters. Its Hugging Face names follow."""

_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")


def _rule(name: str, a: Architecture, layout: ParallelLayout) -> Rule:
    if name.startswith(TOWER):
        return partial(_direct, name, name.removeprefix(TOWER))
    embedding, rank = f"{a.decoder}.embed_tokens.weight", layout.tensor_rank
    top: dict[str, Rule] = {
        "embedding.word_embeddings.weight": partial(_vocabulary, name, embedding, a, rank),
        "output_layer.weight": partial(
            _vocabulary, name, embedding if a.tied else "lm_head.weight", a, rank
        ),
        "decoder.final_layernorm.weight": partial(_direct, name, f"{a.decoder}.norm.weight"),
    }
    if name in top:
        return top[name]
    if (found := _LAYER.fullmatch(name)) is None:
        raise UnmappedParameter(name, "has no Hugging Face name")
    layer = layout.grid.list_layers(layout.pipeline_rank, a.layers)[int(found[1])]
    return _layer_rule(name, found[2], f"{a.decoder}.layers.{layer}.", a, layout)


def _layer_rule(
    name: str, within: str, prefix: str, a: Architecture, layout: ParallelLayout
) -> Rule:
    attention, part = f"{prefix}self_attn.", MatrixPart(layout.tensor_rank, layout.grid.tensor)
    rules: dict[str, Rule] = {
        "input_layernorm.weight": partial(_direct, name, f"{prefix}input_layernorm.weight"),
        "pre_mlp_layernorm.weight": partial(
            _direct, name, f"{prefix}post_attention_layernorm.weight"
        ),
        "self_attention.linear_qkv.weight": partial(_qkv, name, attention, "weight", a, part),
        "self_attention.linear_qkv.bias": partial(_qkv, name, attention, "bias", a, part),
        "self_attention.q_layernorm.weight": partial(_direct, name, f"{attention}q_norm.weight"),
        "self_attention.k_layernorm.weight": partial(_direct, name, f"{attention}k_norm.weight"),
        "self_attention.linear_proj.weight": partial(_row, name, f"{attention}o_proj.weight", part),
        "mlp.linear_fc1.weight": partial(_split_gated, name, f"{prefix}mlp.", part),
        "mlp.linear_fc2.weight": partial(_row, name, f"{prefix}mlp.down_proj.weight", part),
        "mlp.shared_experts.linear_fc1.weight": partial(
            _split_gated, name, f"{prefix}mlp.{a.shared_name}.", part
        ),
        "mlp.shared_experts.linear_fc2.weight": partial(
            _row, name, f"{prefix}mlp.{a.shared_name}.down_proj.weight", part
        ),
        "mlp.shared_experts.gate_weight": partial(
            _direct, name, f"{prefix}mlp.shared_expert_gate.weight"
        ),
        "mlp.router.weight": partial(_direct, name, f"{prefix}mlp.gate.weight"),
        ROUTER_BIAS: partial(_direct, name, f"{prefix}mlp.gate.{_BIAS}"),
    }
    if within in rules:
        return rules[within]
    if (found := _EXPERT.fullmatch(within)) is None:
        raise UnmappedParameter(name, "has no Hugging Face name")
    expert = int(found[1]) + layout.expert_rank * (a.experts // layout.grid.expert)
    inside = f"{prefix}mlp.experts.{expert}."
    part = MatrixPart(layout.expert_tensor_rank, layout.grid.expert_tensor_ranks)
    experts: dict[str, Rule] = {
        "linear_fc1.weight": partial(_split_gated, name, inside, part),
        "linear_fc2.weight": partial(_row, name, f"{inside}down_proj.weight", part),
    }
    if found[2] not in experts:
        raise UnmappedParameter(name, "has no Hugging Face name")
    return experts[found[2]]


def _direct(parameter: str, tensor: str, shape: Shape) -> list[TensorBox]:
    everything = Region.whole(shape)
    return [TensorBox(tensor, shape, everything, parameter, everything)]


def _row(parameter: str, tensor: str, part: MatrixPart, shape: Shape) -> list[TensorBox]:
    rows, columns = shape
    whole = rows, columns * part.of
    region = Region.at((0, columns * part.index), shape)
    return [TensorBox(tensor, whole, region, parameter, Region.whole(shape))]


def _split_gated(parameter: str, prefix: str, part: MatrixPart, shape: Shape) -> list[TensorBox]:
    rows, columns = shape[0] // 2, shape[1]
    whole, half = (rows * part.of, columns), (rows, columns)
    return [
        TensorBox(
            f"{prefix}{name}.weight",
            whole,
            Region.at((rows * part.index, 0), half),
            parameter,
            Region.at((rows * index, 0), half),
        )
        for index, name in enumerate(("gate_proj", "up_proj"))
    ]


def _qkv(
    parameter: str, prefix: str, kind: str, a: Architecture, part: MatrixPart, shape: Shape
) -> list[TensorBox]:
    queries, others, at = a.heads // a.groups, shape[1:], 0
    zeros, start, stop = (0,) * len(others), shape[0] * part.index, shape[0] * (part.index + 1)
    boxes = list[TensorBox]()
    for group in range(a.groups):
        for name, heads, whole in (("q", queries, a.heads), ("k", 1, a.groups), ("v", 1, a.groups)):
            rows = heads * a.head_dim
            first, last = max(at, start), min(at + rows, stop)
            if first < last:
                held = (last - first, *others)
                boxes.append(
                    TensorBox(
                        f"{prefix}{name}_proj.{kind}",
                        (whole * a.head_dim, *others),
                        Region.at((group * rows + first - at, *zeros), held),
                        parameter,
                        Region.at((first - start, *zeros), held),
                    )
                )
            at += rows
    return boxes


def _vocabulary(
    parameter: str, tensor: str, a: Architecture, rank: int, shape: Shape
) -> list[TensorBox]:
    whole = a.vocabulary, shape[1]
    region = Region.at((shape[0] * rank, 0), shape).intersection(Region.whole(whole))
    if region is None:
        return []  # only padding
    return [TensorBox(tensor, whole, region, parameter, Region.whole(region.shape))]


def _padding(name: str, shape: Shape, a: Architecture, layout: ParallelLayout) -> int:
    """Return the number of elements of a parameter that only pad the vocabulary."""
    if name not in _EMBEDDINGS:
        return 0
    end = shape[0] * (layout.tensor_rank + 1)
    return min(shape[0], max(0, end - a.vocabulary)) * shape[1]
