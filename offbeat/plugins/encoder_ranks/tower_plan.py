"""Plans by which encoder ranks divide the matrices of a vision tower, by family.

transformers has no tensor-parallel plan for vision towers, so this module names the layers of each
family. A tower with one matrix for queries, keys and values divides its rows over the ranks in
their given order. It gathers the results and computes all heads on every rank. Patch embedding,
norms and projector are whole on every rank.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs untyped.

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from offbeat.plugins.encoder_ranks.layout import Grid
from offbeat.plugins.tensor_ranks.tensor_parallel import (
    COLUMNS,
    GATHERED,
    ROWS,
    SPLIT,
    beside_plan,
    check_divided,
    tensor_plan,
    widths,
)
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.sides import Side

SETTING: Final = "trainer.encoder.tensor_parallel"
_APART: Final = {
    "self_attn.q_proj": COLUMNS,
    "self_attn.k_proj": COLUMNS,
    "self_attn.v_proj": COLUMNS,
    "self_attn.out_proj": ROWS,
    "mlp.fc1": COLUMNS,
    "mlp.fc2": ROWS,
}
_IN_ONE: Final = {"attn.qkv": GATHERED, "attn.proj": SPLIT}


@dataclass(frozen=True, slots=True)
class _Layers:
    """Repeated layers of a family's tower."""

    named: str  # pattern of a layer's name
    kinds: Mapping[str, str]  # kind of division by name within a layer
    divides_heads: bool = False  # whether a rank computes a share of the attention heads


_THIRD_QWEN: Final = _Layers(
    r"model\.visual\.blocks\.\d+",
    {**_IN_ONE, "mlp.linear_fc1": COLUMNS, "mlp.linear_fc2": ROWS},
)
_FAMILIES: Final = {
    "idefics3": _Layers(r"model\.vision_model\.encoder\.layers\.\d+", _APART, divides_heads=True),
    "smolvlm": _Layers(r"model\.vision_model\.encoder\.layers\.\d+", _APART, divides_heads=True),
    "gemma3": _Layers(
        r"model\.vision_tower\.(vision_model\.)?encoder\.layers\.\d+", _APART, divides_heads=True
    ),
    "qwen2_vl": _Layers(
        r"model\.visual\.blocks\.\d+", {**_IN_ONE, "mlp.fc1": COLUMNS, "mlp.fc2": ROWS}
    ),
    "qwen2_5_vl": _Layers(
        r"model\.visual\.blocks\.\d+",
        {**_IN_ONE, "mlp.gate_proj": COLUMNS, "mlp.up_proj": COLUMNS, "mlp.down_proj": ROWS},
    ),
    "qwen3_vl": _THIRD_QWEN,
    "qwen3_vl_moe": _THIRD_QWEN,
}


class TowerDivision(NamedTuple):
    """Division of a tower over any suitable number of ranks."""

    plan: dict[str, str]  # kind of division by module name
    heads: int  # attention heads to divide over ranks; 0: every rank computes all


def tower_division(model: PreTrainedModel) -> TowerDivision:
    """Return how ranks divide the tower of a model.

    Reads only names and sizes, so the model may be without memory.

    Raises:
        UntrainableModel: The family is unknown, or its tower has unknown modules.
    """
    name, layers = type(model).__name__, _FAMILIES.get(model.config.model_type)
    if layers is None:
        kind = model.config.model_type
        problem = f"has a vision tower that no rule divides: {kind} is not {', '.join(_FAMILIES)}"
        raise UntrainableModel(name, problem, f"Set {SETTING} to 1")
    plan = dict(_find_divided(model, layers))
    for each in _problems(model, layers, plan):
        problem = f"has a vision tower that cannot be divided: {each}"
        raise UntrainableModel(name, problem, f"Set {SETTING} to 1")
    heads = model.config.vision_config.num_attention_heads if layers.divides_heads else 0
    return TowerDivision(plan, heads)


def tower_plan(model: PreTrainedModel, ranks: int) -> dict[str, str]:
    """Return the kind of division by module name of a tower, or no entry for one rank.

    Raises:
        UntrainableModel: As ``tower_division``, or ``ranks`` does not divide the tower's sizes.
    """
    if ranks == 1:
        return {}
    plan, heads = tower_division(model)
    counts = {"attention heads in its vision tower": heads} | widths(model, plan)
    check_divided(type(model).__name__, counts, ranks, SETTING)
    return plan


def make_plans(model: PreTrainedModel, grid: Grid) -> dict[Side, dict[str, str]]:
    """Return how each side's ranks divide matrices as DTensors, by module name of the model.

    Raises:
        UntrainableModel: As ``tower_plan`` and ``tensor_plan``.
    """
    language, tower = (grid.count_tensor_ranks(side) for side in (Side.LANGUAGE, Side.TOWER))
    decoder = {} if language == 1 else tensor_plan(model, language, holds_tower=False)
    return {Side.LANGUAGE: decoder, Side.TOWER: tower_plan(model, tower)}


def _find_divided(model: PreTrainedModel, layers: _Layers) -> Iterator[tuple[str, str]]:
    """Yield name and kind of the divided modules in a tower's layers."""
    of_layer = re.compile(rf"{layers.named}\.(?P<within>.+)")
    for name, _ in model.named_modules():
        found = of_layer.fullmatch(name)
        if found and (kind := layers.kinds.get(found["within"])):
            yield name, kind


def _problems(model: PreTrainedModel, layers: _Layers, plan: Mapping[str, str]) -> Iterator[str]:
    """Yield differences between the model and the plan of its family."""
    found = [name for name, _ in model.named_modules() if re.fullmatch(layers.named, name)]
    for layer in found:
        for within in layers.kinds:
            module = f"{layer}.{within}"
            if module not in plan:
                yield f"{layer} has no {within}"
            elif not isinstance(model.get_submodule(module), nn.Linear):
                yield f"{module} is not a linear layer"
    if not found:
        yield f"no module is named {layers.named}"
    for name in beside_plan(model, plan.keys()):
        yield f"{name} reads what is divided beside it, but no rule divides it"
