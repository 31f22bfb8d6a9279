"""The vision tower of a rank of the first stage: transformers' own modules next to megatron-core's.

Every rank that embeds tokens holds the whole tower. Ranks that share matrices, or the tokens of a
row, compute the same features. Each has a part of the loss gradient with respect to them: for its
own tokens, or an equal share for all. The parts are summed once per step. Frozen weights of the
tower have no gradient to sum.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# megatron-core has no types; transformers leaves its loading functions untyped.

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from offbeat.messages.media import Media
from offbeat.models.loading import model_without_memory
from offbeat.models.media_passes import Features, FeaturesMismatch
from offbeat.models.media_rules import MediaRules
from offbeat.plugins.megatron.mapping import TOWER
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.sides import Side, keep_side
from offbeat.trainers.torch.model import make_unfilled_model

FeatureSource = Callable[[tuple[Media, ...]], Features]
"""Pictures -> their features, in the order of the placeholders."""

_ATTRIBUTE: Final = TOWER.removesuffix(".")


def make_unfilled_tower(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the tower of a directory's model. The caller loads its weights.

    Raises:
        UntrainableModel: Some weights of the tower have a different dtype.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    tower = make_unfilled_model(config, dtype, trust_remote_code=False)
    keep_side(tower, Side.TOWER)
    tower.to_empty(device=torch.cuda.current_device())
    tower.initialize_weights()  # buffers, which no file has
    if {each.dtype for each in tower.parameters()} != {dtype}:
        fix = "Set model.dtype to float32, or trainer.backend to torch"
        raise UntrainableModel(type(tower).__name__, "has a tower of several dtypes", fix)
    return tower.eval()


def attach_tower(model: GPTModel, path: Path, dtype: torch.dtype) -> None:
    """Add the tower of a directory's model to a first stage. The caller loads its weights.

    Raises:
        UntrainableModel: Some weights of the tower have a different dtype.
    """
    model.add_module(_ATTRIBUTE, make_unfilled_tower(path, dtype))


def find_tower(model: GPTModel) -> PreTrainedModel | None:
    """Return the tower of a stage, or None if it has none."""
    return cast("PreTrainedModel | None", dict(model.named_children()).get(_ATTRIBUTE))


def features_by(tower: PreTrainedModel, rules: MediaRules) -> FeatureSource:
    """Return the function that computes features on this rank.

    It raises ``FeaturesMismatch`` if the number of features differs from the number of placeholders
    in the prompts.
    """

    def compute(media: tuple[Media, ...]) -> Features:
        made = rules.encode(tower, media)
        wanted = sum(map(rules.count_features, media))
        if len(made.embedded_FH) != wanted:
            raise FeaturesMismatch(type(tower).__name__, len(made.embedded_FH), wanted)
        return made

    return compute


def sum_tower_gradients(model: GPTModel, group: ProcessGroup) -> None:
    """Sum the parts of the tower's gradients over the ranks of ``group``, which all call it."""
    tower = find_tower(model)
    if tower is None or dist.get_world_size(group) == 1:
        return
    gradients = list(_gradients(tower))
    if not gradients:
        return
    flat = torch.cat([each.reshape(-1) for each in gradients])
    dist.all_reduce(flat, group=group)
    parts = flat.split([each.numel() for each in gradients])
    for each, whole in zip(gradients, parts, strict=True):
        each.copy_(whole.view_as(each))


def _gradients(tower: PreTrainedModel) -> Iterator[Tensor]:
    for parameter in tower.parameters():
        if parameter.requires_grad:
            yield parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue] -- the library's


def names_in_files(path: Path) -> dict[str, str]:
    """Return the names in a directory's files, for weights that have different names in its model.

    transformers renames the weights of some image-text models when it loads them.
    """
    model = model_without_memory(path, trust_remote_code=False)
    mapping: list[Any] = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    known, named = model.state_dict(), dict[str, str]()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for stored in opened.keys():  # noqa: SIM118 -- no mapping
                name, _ = rename_source_key(stored, renamings, [], model.base_model_prefix, known)
                if name != stored:
                    named[name] = stored
    return named
