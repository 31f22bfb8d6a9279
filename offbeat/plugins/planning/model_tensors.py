"""Names, shapes and wire types of a model's tensors, only from its config."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers import AutoConfig, PreTrainedModel

from offbeat.messages.failures import OffbeatError
from offbeat.models.loading import find_auto_class
from offbeat.plugins.planning.declared import DeclaredTensor, ModelSizes
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.expert_names import APART
from offbeat.trainers.torch.matrix_division import RECIPE_NAMES, SizeNames, find_division
from offbeat.weight_sync.chunks import dtype_name
from offbeat.weight_sync.dtypes import ITEMSIZE, WirePolicy
from offbeat.weight_sync.wire_format import wire_metas

_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")


class UnreadableModelConfig(OffbeatError):
    """A config without a model for which tensors can be listed.

    Fix: pass the ``config.json`` of a model that transformers knows.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.problem}. Give a Hugging Face config.json, or its directory, of a "
            "model that transformers knows"
        )


def model_tensors(
    path: Path,
    policy: WirePolicy,
    *,
    tensor_ranks: int = 1,
    holds_tower: bool = True,
    names: SizeNames = RECIPE_NAMES,
) -> tuple[list[DeclaredTensor], ModelSizes]:
    """List the tensors of a model as its files name them, without allocating any.

    Args:
        path: ``config.json``, or the directory that contains it.
        policy: Wire types. If it names none, tensors are sent in the config's type.
        tensor_ranks: Ranks of the torch trainer that divide matrices by the model's own plan.
        holds_tower: Whether these ranks also hold the vision tower, if the model has one.
        names: Names that errors use for the sizes to change, if these ranks do not divide the
            model.

    Raises:
        UnreadableModelConfig: The file is missing, or transformers does not know the model.
        UntrainableModel: The model has no plan for ranks of the torch trainer, or they do not
            divide it.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UnreadableModelConfig(str(file), f"cannot be read ({error})") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise UnreadableModelConfig(str(file), "has no model_type")
    try:
        config = AutoConfig.for_model(**values)
        with torch.device("meta"):
            module = find_auto_class(config).from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableModelConfig(str(file), f"is not understood ({error})") from error
    tied = bool(values.get("tie_word_embeddings", config.tie_word_embeddings))
    served = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16")
    wire = msgspec.structs.replace(policy, dtype=policy.dtype or served)
    metas = (
        (name, tuple(each.shape), dtype_name(each))
        for name, each in module.state_dict().items()
        if not (tied and name == "lm_head.weight")
    )
    tensors = [
        DeclaredTensor(each.name, each.shape, ITEMSIZE[each.dtype])
        for each in wire_metas(APART.metas(metas), wire)
    ]
    text = config.get_text_config(decoder=True)
    sizes = _sizes(text.to_dict(), text.num_hidden_layers, tied=tied)
    axes = None  # by name, for tensors that ranks of the torch trainer divide
    if tensor_ranks > 1:
        plan = find_division().plan(module, tensor_ranks, holds_tower=holds_tower, names=names)
        axes = _axes(module, plan)
    return tensors, replace(_with_tower(sizes, module), tensor_axes=axes)


def _axes(module: PreTrainedModel, plan: Mapping[str, str]) -> dict[str, int]:
    cut_axis = find_division().cut_axis
    axes = ((name, cut_axis(plan, name, each.ndim)) for name, each in module.named_parameters())
    return {name: axis for name, axis in axes if axis is not None}


def _with_tower(sizes: ModelSizes, module: PreTrainedModel) -> ModelSizes:
    """Add the ranks' parts of a vision tower. Ranks divide no tower of an unknown family."""
    if not (tower := _tower(module)):
        return sizes
    from offbeat.plugins.encoder_ranks.tower_plan import (  # noqa: PLC0415 -- an option
        tower_division,
    )

    try:
        plan, heads = tower_division(module)
    except UntrainableModel:
        return replace(sizes, tower=tower)
    return replace(sizes, tower=tower, tower_axes=_axes(module, plan), tower_heads=heads)


def _tower(module: Any) -> frozenset[str]:  # noqa: ANN401 -- transformers types it as a union of unknowns
    """Return the names of the vision tower's tensors, or an empty set if the model has none."""
    if "vision_config" not in module.config.sub_configs:
        return frozenset()
    language = {id(each) for each in module.get_decoder().state_dict(keep_vars=True).values()}
    language.add(id(module.get_output_embeddings().weight))
    state = module.state_dict(keep_vars=True)
    return frozenset(name for name, each in state.items() if id(each) not in language)


def _sizes(values: dict[str, Any], layers: int, *, tied: bool) -> ModelSizes:
    heads = values.get("num_attention_heads") or 1
    segments, groups = (), 1
    if width := values.get("mamba_num_heads"):
        inner, groups = width * values["mamba_head_dim"], values["n_groups"]
        state = groups * values["ssm_state_size"]
        segments = (inner, inner, state, state, width)
    return ModelSizes(
        layers=layers,
        key_value_heads=values.get("num_key_value_heads") or heads,
        experts=next((values[key] for key in _EXPERTS if values.get(key)), 0),
        tied=tied,
        segments=segments,
        state_space_groups=groups,
        attention_heads=values.get("num_attention_heads") or 0,
    )
