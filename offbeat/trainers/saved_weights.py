"""Weights of a checkpoint or a Hugging Face directory, from any backend, by name.

state_N   of the torch trainer: its weights in the names of transformers, masters of 16-bit ones
state_N   of a trainer of a plug-in: the names of the model's files
step_N    an exported model, or any other Hugging Face directory: the names of its files
adapter   PEFT's files, and a state of a trainer of adapters: the names of PEFT's files

Choice of the weight names that the engines of a run load, checked before the first step.

An embedded engine is a module of transformers and has exactly the module's weights. An engine of a
plug-in may load the names of the model's files, which may contain more than is trained.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.
# safetensors declares its files without types.

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import AutoConfig

from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import list_names
from offbeat.models.loading import auto_class_of
from offbeat.trainers.checkpoints.weight_files import opened_tensors
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.expert_names import (
    APART,
    AS_THEY_ARE,
    TOGETHER,
    ExpertNames,
    Meta,
    Named,
    UnjoinedExperts,
)
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.torch.state import METADATA, load_shards, saved_shapes
from offbeat.trainers.trainer_plugin import TrainerPlugin, known_parts, known_trainers
from offbeat.weight_sync.chunks import named_weights

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
    raise _unmapped(path, "the embedded engine", [name for name, _ in differing])


def names_for_files(
    path: str | Path, metas: Sequence[Meta], engine: str = "the engine"
) -> ExpertNames:
    """Return the naming of a trainer's weights for an engine that loads the names of model files.

    Without safetensors files, there are no names to compare. Then the names are unchanged, and the
    engine rejects unknown names at the first sync.

    Raises:
        UntrainableModel: No known naming yields names that are all in the files.
    """
    wanted = file_shapes(path)
    names = names_that_fit(metas, wanted)
    made = {name: shape for name, shape, _ in names.metas(metas)}
    if wanted and (lacking := _lacking(made, wanted)):
        raise _unmapped(path, engine, lacking)
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
    with torch.device("meta"):
        module = auto_class_of(config).from_config(config, trust_remote_code=remote_code)
    return {name: tuple(each.shape) for name, each in named_weights(module)}


def file_shapes(path: str | Path) -> Shapes:
    """Return name and shape of every tensor in a directory's safetensors headers."""
    shapes = dict[str, tuple[int, ...]]()
    for file in sorted(Path(path).glob("*.safetensors")):
        with opened_tensors(file) as opened:
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
    """Return the name in the files, which may lack the base model's prefix."""
    short = name.partition(".")[2]
    return short if name not in files and short in files else name


def _lacking(made: Shapes, wanted: Shapes) -> list[str]:
    """Return the missing names. Names in files may lack the base model's prefix."""
    return [
        name
        for name, shape in made.items()
        if shape not in (wanted.get(name), wanted.get(name.partition(".")[2]))
    ]


def _unmapped(path: str | Path, receiver: str, names: Sequence[str]) -> UntrainableModel:
    some = list_names(names, _NAMED_IN_ERROR)
    problem = f"has weights that {receiver} holds under other names or in other shapes: {some}"
    fix = "Set generator.backend to the other engine, or take a model of another family"
    return UntrainableModel(str(path), problem, fix)


_WEIGHT: Final = "weight/"
_CONFIG: Final = "config.json"


class NoSavedWeights(OffbeatError):
    """A directory without weights to compare."""

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} {self.problem}. Name a run, one of its checkpoints (state_N, step_N), or a "
            "directory with *.safetensors"
        )


class SavedWeights:
    """Weights of a directory. Each is read when the iteration reaches it."""

    def __init__(
        self, path: Path, shapes: Callable[[], Shapes], named: Callable[[], Iterator[Named]]
    ) -> None:
        self.path, self.named = path, named
        self._shapes = shapes()

    def named_like(self, wanted: Shapes) -> Iterator[Named]:
        """Yield all weights, with experts together or apart as in ``wanted``."""
        metas = [(name, shape, "") for name, shape in self._shapes.items()]
        return names_that_fit(metas, wanted).named(self.named())

    def shapes_like(self, wanted: Shapes) -> Shapes:
        """Return name and shape of all weights under the names of ``named_like``."""
        metas = [(name, shape, "") for name, shape in self._shapes.items()]
        named = names_that_fit(metas, wanted).metas(metas)
        return {name: shape for name, shape, _ in named}

    @property
    def has_adapters(self) -> bool:
        """Return whether the weights are only adapters."""
        return any(part.names_addition(name) for part in known_parts() for name in self._shapes)


def saved_weights(path: Path) -> SavedWeights:
    """Return the weights of a checkpoint or of a Hugging Face directory.

    Raises:
        NoSavedWeights: It has no weights.
        OSError: A file cannot be read.
    """
    if (path / METADATA).is_file():
        return SavedWeights(path, lambda: _torch_shapes(path), lambda: _of_torch_state(path))
    for plugin in known_trainers().values():
        if plugin.wrote_state(path):
            return _of_plugin(plugin, path)
    if any(path.glob("*.safetensors")):
        return SavedWeights(
            path,
            lambda: file_shapes(path),
            lambda: ((name, read()) for name, read in readers(path).items()),
        )
    raise NoSavedWeights(str(path), "holds no weights" if path.is_dir() else "is no directory")


def readers(path: Path) -> dict[str, Callable[[], Tensor]]:
    """Return a function per tensor of a directory's safetensors files that reads the tensor.

    An output head that the directory's config ties to the embedding is omitted.
    """
    found = dict[str, Callable[[], Tensor]]()
    for file in sorted(path.glob("*.safetensors")):
        with opened_tensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping
                found[name] = _reader(file, name)
    if _is_tied(path):
        found.pop("lm_head.weight", None)
    return found


def _reader(file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with opened_tensors(file) as opened:
            return opened.get_tensor(name)

    return read


def _is_tied(path: Path) -> bool:
    config = path / _CONFIG
    if not config.is_file():
        return False
    try:
        values: object = json.loads(config.read_bytes())
    except ValueError as error:
        raise OSError(f"{config} is not JSON: {error}. Copy it again") from error
    return isinstance(values, dict) and bool(values.get("tie_word_embeddings", False))


def _torch_shapes(path: Path) -> Shapes:
    return {
        _file_name(key): shape
        for key, (shape, _) in saved_shapes(path).items()
        if key.startswith(_WEIGHT)
    }


def _of_torch_state(path: Path) -> Iterator[Named]:
    for key, (shape, dtype) in saved_shapes(path).items():
        if key.startswith(_WEIGHT):
            tensor = torch.empty(shape, dtype=dtype)
            load_shards({key: tensor}, path, SingleRank())
            yield _file_name(key), tensor


def _file_name(key: str) -> str:
    """Return a weight's name in files. Parts of a trainer may rename weights that they added."""
    name = key.removeprefix(_WEIGHT)
    renamed = (part.name_in_files(name) for part in known_parts())
    return next((each for each in renamed if each is not None), name)


def _of_plugin(plugin: TrainerPlugin, path: Path) -> SavedWeights:
    return SavedWeights(
        path,
        lambda: {name: tuple(each.shape) for name, each in plugin.read_weights(path)},
        lambda: plugin.read_weights(path),
    )
