"""Weights of a checkpoint or a Hugging Face directory, from any backend, by name.

state_N   of the torch trainer: weights under transformers' names; float32 masters of 16-bit ones
state_N   of a plug-in's trainer: weights under the names of the model's files
step_N    an exported model, or any other Hugging Face directory: weights under its files' names
adapter   PEFT's files, or a state of a trainer of adapters: weights under the names of PEFT's files
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# safetensors declares its files without types.

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from offbeat.messages.failures import OffbeatError
from offbeat.trainers.checkpoints.weight_files import open_tensors
from offbeat.trainers.expert_names import Named
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.receiver_names import Shapes, file_shapes, names_that_fit
from offbeat.trainers.torch.state import METADATA, load_shards, read_saved_shapes
from offbeat.trainers.trainer_plugin import TrainerPlugin, known_parts, known_trainers

_WEIGHT: Final = "weight/"
_CONFIG: Final = "config.json"


class NoSavedWeights(OffbeatError):
    """A directory without weights to compare.

    Fix: pass a directory with ``*.safetensors``.
    """

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

    def iterate_like(self, wanted: Shapes) -> Iterator[Named]:
        """Yield all weights, with experts together or apart as in ``wanted``."""
        metas = [(name, shape, "") for name, shape in self._shapes.items()]
        return names_that_fit(metas, wanted).named(self.named())

    def shapes_like(self, wanted: Shapes) -> Shapes:
        """Return name and shape of all weights under the names of ``iterate_like``."""
        metas = [(name, shape, "") for name, shape in self._shapes.items()]
        named = names_that_fit(metas, wanted).metas(metas)
        return {name: shape for name, shape, _ in named}

    @property
    def has_adapters(self) -> bool:
        """Return whether the weights are only adapters."""
        return any(part.names_addition(name) for part in known_parts() for name in self._shapes)


def open_saved_weights(path: Path) -> SavedWeights:
    """Return the weights of a checkpoint or of a Hugging Face directory.

    Raises:
        NoSavedWeights: The directory has no weights.
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
    raise NoSavedWeights(str(path), "holds no weights" if path.is_dir() else "is not a directory")


def readers(path: Path) -> dict[str, Callable[[], Tensor]]:
    """Return a function per tensor of a directory's safetensors files that reads the tensor.

    An output head that the directory's config ties to the embedding is omitted.
    """
    found = dict[str, Callable[[], Tensor]]()
    for file in sorted(path.glob("*.safetensors")):
        with open_tensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping
                found[name] = _reader(file, name)
    if _is_tied(path):
        found.pop("lm_head.weight", None)
    return found


def _reader(file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with open_tensors(file) as opened:
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
        for key, (shape, _) in read_saved_shapes(path).items()
        if key.startswith(_WEIGHT)
    }


def _of_torch_state(path: Path) -> Iterator[Named]:
    for key, (shape, dtype) in read_saved_shapes(path).items():
        if key.startswith(_WEIGHT):
            tensor = torch.empty(shape, dtype=dtype)
            load_shards({key: tensor}, path, SingleRank())
            yield _file_name(key), tensor


def _file_name(key: str) -> str:
    """Return a weight's name in files. A part of a trainer may rename weights that it added."""
    name = key.removeprefix(_WEIGHT)
    renamed = (part.name_in_files(name) for part in known_parts())
    return next((each for each in renamed if each is not None), name)


def _of_plugin(plugin: TrainerPlugin, path: Path) -> SavedWeights:
    return SavedWeights(
        path,
        lambda: {name: tuple(each.shape) for name, each in plugin.read_weights(path)},
        lambda: plugin.read_weights(path),
    )
