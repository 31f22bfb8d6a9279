"""Choice of the weight names that the engines of a run load, checked before the first step.

An embedded engine is a module of transformers and has exactly the module's weights. An engine of a
plug-in may load weights by their names in the model's files, which may contain more than the
trained weights.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import AutoConfig

from offbeat.messages.text import list_names
from offbeat.models.loading import LOADING, find_auto_class
from offbeat.trainers.checkpoints.weight_files import open_tensors
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.expert_names import (
    APART,
    AS_THEY_ARE,
    TOGETHER,
    ExpertNames,
    Meta,
    UnjoinedExperts,
)
from offbeat.weight_sync.chunks import iterate_weights

Shapes = Mapping[str, tuple[int, ...]]
_NAMED_IN_ERROR: Final = 3


def names_for_module(path: str | Path, metas: Sequence[Meta], *, remote_code: bool) -> ExpertNames:
    """Return the naming of a trainer's weights for an engine that is a module of transformers.

    Raises:
        UntrainableModel: No known naming yields the weights of the module.
    """
    wanted = module_shapes(path, remote_code=remote_code)
    tried = _shapes_by_naming(metas)
    for names, made in tried:
        if made == wanted:
            return names
    _, made = tried[0]
    differing = sorted(set(made.items()) ^ set(wanted.items()))
    raise _make_unmapped_error(path, "the embedded engine", [name for name, _ in differing])


def names_for_files(
    path: str | Path, metas: Sequence[Meta], engine: str = "the engine"
) -> ExpertNames:
    """Return the naming of a trainer's weights for an engine that loads the names of model files.

    Without safetensors files, there are no names to compare. Then the names are unchanged, and the
    engine rejects unknown names at the first sync.

    Raises:
        UntrainableModel: Under every known naming, some names are missing in the files.
    """
    wanted = file_shapes(path)
    names = names_that_fit(metas, wanted)
    made = {name: shape for name, shape, _ in names.metas(metas)}
    if wanted and (lacking := _lacking(made, wanted)):
        raise _make_unmapped_error(path, engine, lacking)
    return names


def names_that_fit(metas: Sequence[Meta], wanted: Shapes) -> ExpertNames:
    """Return the naming under which all weights are in ``wanted``, else the trainer's naming."""
    for names, made in _shapes_by_naming(metas):
        if not _lacking(made, wanted):
            return names
    return AS_THEY_ARE


def module_shapes(path: str | Path, *, remote_code: bool) -> Shapes:
    """Return name and shape of every weight of transformers' module, without allocating it."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=remote_code, local_files_only=True)
    with LOADING, torch.device("meta"):
        module = find_auto_class(config).from_config(config, trust_remote_code=remote_code)
    return {name: tuple(each.shape) for name, each in iterate_weights(module)}


def file_shapes(path: str | Path) -> Shapes:
    """Return name and shape of every tensor in a directory's safetensors headers."""
    shapes = dict[str, tuple[int, ...]]()
    for file in sorted(Path(path).glob("*.safetensors")):
        with open_tensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping
                shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


def _shapes_by_naming(metas: Sequence[Meta]) -> list[tuple[ExpertNames, Shapes]]:
    """Return the shapes by name under each naming that is applicable."""
    made = list[tuple[ExpertNames, Shapes]]()
    for names in (AS_THEY_ARE, APART, TOGETHER):
        try:
            made.append((names, {name: shape for name, shape, _ in names.metas(metas)}))
        except UnjoinedExperts:
            continue
    return made


def name_in_files(name: str, files: Collection[str]) -> str:
    """Return a weight's name in the files, which may lack the base model's prefix."""
    short = name.partition(".")[2]
    return short if name not in files and short in files else name


def _lacking(made: Shapes, wanted: Shapes) -> list[str]:
    """Return the names that the files lack. Names in files may lack the base model's prefix."""
    return [
        name
        for name, shape in made.items()
        if shape not in (wanted.get(name), wanted.get(name.partition(".")[2]))
    ]


def _make_unmapped_error(path: str | Path, receiver: str, names: Sequence[str]) -> UntrainableModel:
    some = list_names(names, _NAMED_IN_ERROR)
    problem = (
        f"has weights that {receiver} holds under different names or in different shapes: {some}"
    )
    fix = "Set generator.backend to the other engine, or use a model of a different family"
    return UntrainableModel(str(path), problem, fix)
