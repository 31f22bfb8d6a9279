"""Tensor parallelism of a transformers model: several ranks divide its matrices among themselves.

The model's own config (``base_model_tp_plan``) decides which matrices are split, and how. A model
without such a plan, or with unknown kinds in it, is refused by name. Embedding and output head are
divided by rows (``vocabulary_rows``). Unlisted weights are whole on every rank: norms of the hidden
state, and a vocabulary that cannot be divided. A part of the trainer may add two matrices to a
matrix. One of them is then divided too: the last one if the matrix is divided by columns, the first
one if by rows.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs untyped.

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import accumulate, chain, islice
from math import gcd
from typing import Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from offbeat.models.media_rules import media_rules
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.logprobs import divide_vocabulary, vocabulary_modules
from offbeat.trainers.torch.matrix_division import RECIPE_NAMES, SizeNames
from offbeat.trainers.trainer_plugin import AddedModules, known_parts

COLUMNS: Final = "colwise"
ROWS: Final = "rowwise"
HEADS: Final = "replicated_with_grad_allreduce"
GATHERED: Final = "colwise_gather_output"
SPLIT: Final = "rowwise_split_input"
VOCABULARY: Final = "vocabulary"
_KINDS: Final = (COLUMNS, ROWS, HEADS)
_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
"""Config keys of expert layers. A plan may omit experts, and each rank would hold them whole."""

_HEADS_AXIS: Final = 2
"""Axis of the heads in the input of query and key norms, [R, T, heads, D].

A model may swap this axis with the tokens without effect, because a norm only reduces the last
axis.
"""


def tensor_plan(
    model: PreTrainedModel,
    ranks: int,
    *,
    holds_tower: bool = True,
    names: SizeNames = RECIPE_NAMES,
) -> dict[str, str]:
    """Return the kind of division by module name. It needs only names and sizes, no memory.

    ``COLUMNS`` divides the outputs of a matrix, ``ROWS`` its inputs. ``HEADS`` is a norm of queries
    or keys. It is whole on every rank, and each rank has the gradient of its heads.
    ``VOCABULARY`` divides embedding and output head by tokens, in parts that may differ by some
    rows. An image-text model keeps both whole, even if its class divides them, as some do since
    transformers 5.24.

    Args:
        model: A causal LM.
        ranks: Number of tensor ranks.
        holds_tower: Whether its ranks also hold the vision tower, if it has one.
        names: Names of the sizes that the user can change.

    Raises:
        UntrainableModel: The model has no plan, one of unknown kinds, or sizes that ``ranks`` does
            not divide.
    """
    name, fix = type(model).__name__, f"Set {names.tensor} to 1"
    has_tower = media_rules(model.config).reads_media
    if holds_tower and has_tower:
        problem = "cannot be divided over tensor ranks that also have its vision tower"
        raise UntrainableModel(
            name, problem, f"{fix}, or give the tower separate ranks: {names.encoders}"
        )
    for problem in chain(_problems(model), _left_out(model)):
        raise UntrainableModel(name, f"cannot be divided over tensor ranks: {problem}", fix)
    kinds = dict(_parts(model))
    config = model.config.get_text_config(decoder=True)
    layers = [config.per_layer_config[place] for place in range(config.num_hidden_layers)]
    heads = [each.num_attention_heads for each in layers]
    shared = [
        getattr(each, "num_key_value_heads", None) or each.num_attention_heads for each in layers
    ]
    # Layers may differ, and their common divisor has the divisors that all of them have
    counts = {"attention heads": gcd(*heads), "key-value heads": gcd(*shared)}
    check_divided(name, counts | widths(model, kinds), ranks, names.tensor)
    vocabulary = () if has_tower else vocabulary_modules(model, ranks)
    return kinds | dict.fromkeys(vocabulary, VOCABULARY)


def check_divided(model: str, counts: Mapping[str, int], ranks: int, setting: str) -> None:
    """Check that ``ranks`` divides every count.

    Args:
        model: Name of the model's class.
        counts: Numbers to divide, by what they count.
        ranks: Number of tensor ranks.
        setting: Key of the recipe that sets ``ranks``.

    Raises:
        UntrainableModel: ``ranks`` does not divide one of the counts.
    """
    common = gcd(*counts.values())  # every number divides zero
    for what, count in counts.items():
        if count % ranks:
            fitting = ", ".join(str(each) for each in range(1, common + 1) if not common % each)
            problem = f"has {count} {what}, which {setting}={ranks} does not divide"
            raise UntrainableModel(model, problem, f"Set {setting} to one of {fitting}")


def widths(model: PreTrainedModel, plan: Mapping[str, str]) -> dict[str, int]:
    """Return the number of divided columns or rows of each matrix of a plan."""
    found = dict[str, int]()
    for name, kind in plan.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) and kind != HEADS:
            is_columns = kind in (COLUMNS, GATHERED)
            wide = module.out_features if is_columns else module.in_features
            found[f"{'columns' if is_columns else 'rows'} in {name}"] = wide
    return found


def cut_axis(plan: Mapping[str, str], weight: str, axes: int) -> int | None:
    """Return the axis along which tensor ranks divide a weight or bias, or None if it is whole."""
    kind = plan.get(weight.rpartition(".")[0])
    if kind in (COLUMNS, GATHERED, VOCABULARY):
        return 0
    return 1 if kind in (ROWS, SPLIT) and axes > 1 else None


def divide(model: PreTrainedModel, mesh: DeviceMesh | None, plan: Mapping[str, str]) -> None:
    """Divide the matrices of a plan over the ranks of a mesh, in place.

    All of its ranks must call it. Divided matrices become DTensors. The input and output of a pair
    of ``COLUMNS`` and ``ROWS``, and their gradients, are whole and equal on all ranks. The same
    holds for a matrix of ``GATHERED`` or ``SPLIT``. Call it before the model is sharded over data
    ranks.

    Args:
        model: Its weights are without memory, or whole and equal on all ranks.
        mesh: The tensor ranks. None: a single rank, and nothing is divided.
        plan: Kind of division by module name, as ``tensor_plan`` returns it.
    """
    if mesh is None:
        return
    is_trained = {name: each.requires_grad for name, each in model.named_parameters()}
    rows = [name for name, kind in plan.items() if kind == VOCABULARY]
    styles = {name: _style(kind) for name, kind in plan.items() if kind != VOCABULARY}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    divide_vocabulary(model, mesh, rows)
    for name, each in model.named_parameters():
        each.requires_grad_(is_trained[name])  # torch's style of norms makes all trained


def _style(kind: str) -> ParallelStyle:
    if kind == COLUMNS:
        return ColwiseParallel()
    if kind == ROWS:
        return RowwiseParallel()
    if kind == GATHERED:
        return ColwiseParallel(output_layouts=Replicate())
    if kind == SPLIT:
        return RowwiseParallel(input_layouts=Replicate())
    return SequenceParallel(sequence_dim=_HEADS_AXIS, use_local_output=True)


def _problems(model: PreTrainedModel) -> Iterator[str]:
    """Yield why no number of ranks divides a model, or nothing if some number does."""
    config = model.config.get_text_config(decoder=True)
    for key in _EXPERTS:
        if count := getattr(config, key, None):
            yield f"its config has {key}={count}, but experts are not divided"
    plan, names = _plan(model), _names_in_decoder(model)
    weights = [name for name, _ in model.get_decoder().named_parameters()]
    if not plan:
        yield "its config has no base_model_tp_plan"
    for pattern, kind in plan.items():
        modules = [name for name, within in names.items() if _is_named(within, pattern)]
        has_experts = any(_is_named(each, pattern) for each in (*names.values(), *weights))
        if ".experts" in pattern and not has_experts:
            continue  # of other models of this class
        if kind not in _KINDS:
            yield f"base_model_tp_plan has {kind} for {pattern}, but only {', '.join(_KINDS)} are known"
        if not modules:
            yield f"base_model_tp_plan has {pattern}, but no module is named so"
        for each in modules:
            added = _find_added(model, each)
            matrix = model.get_submodule(each if added is None else added.matrix)
            if kind != HEADS and not isinstance(matrix, nn.Linear):
                yield f"{each}, which base_model_tp_plan divides, is not a linear layer"


def _left_out(model: PreTrainedModel) -> Iterator[str]:
    """Yield parameters that a plan omits in an attention or feed-forward layer that it divides."""
    for name in beside_plan(model, {name for name, _ in _find_divided(model)}):
        yield f"{name} reads what base_model_tp_plan divides beside it, but is not in that plan"


def beside_plan(model: PreTrainedModel, named: AbstractSet[str]) -> Iterator[str]:
    """Yield the parameters in layers of divided modules that belong to none of these modules."""
    around = {name.rpartition(".")[0] for name in named}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        within = list(accumulate(module.split("."), "{}.{}".format))
        # A decoder layer, named by a number, has norms of the hidden state, which is whole.
        is_beside = any(each in around and not each.rpartition(".")[2].isdigit() for each in within)
        if is_beside and named.isdisjoint(within):
            yield name


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the config's tensor-parallel plan (pattern -> kind), without the embedding.

    The embedding is handled separately.
    """
    plan: dict[str, str] = model.config.get_text_config(decoder=True).base_model_tp_plan or {}
    embedding, decoder = model.get_input_embeddings(), model.get_decoder()
    (name,) = (name for name, each in decoder.named_modules() if each is embedding)
    return {pattern: kind for pattern, kind in plan.items() if not _is_named(name, pattern)}


def _find_divided(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield name and kind of the modules that the plan names, in the order of the model."""
    plan = _plan(model)
    for name, within in _names_in_decoder(model).items():
        kinds = (kind for pattern, kind in plan.items() if _is_named(within, pattern))
        for kind in islice(kinds, 1):
            yield name, kind


def _parts(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield name and kind of each divided module; for a replaced module, two of its parts."""
    for name, kind in _find_divided(model):
        added = _find_added(model, name)
        yield name if added is None else added.matrix, kind
        if added is not None:
            yield added.last if kind == COLUMNS else added.first, kind


def _find_added(model: PreTrainedModel, module: str) -> AddedModules | None:
    """Return the modules by which a part of the trainer replaced a linear module, or None."""
    found = (part.find_added(model, module) for part in known_parts())
    return next((added for added in found if added is not None), None)


def _names_in_decoder(model: PreTrainedModel) -> dict[str, str]:
    """Return each module's name within the decoder, as plans use it, by name in the whole model."""
    decoder = model.get_decoder()
    prefix = next(name for name, each in model.named_modules() if each is decoder)
    return {f"{prefix}.{name}": name for name, _ in decoder.named_modules() if name}


def _is_named(within: str, pattern: str) -> bool:
    """Return whether a plan's pattern matches a module. Its ``*`` is the index of a layer."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), within) is not None
