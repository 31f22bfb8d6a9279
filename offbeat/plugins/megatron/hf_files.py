"""Weights of a Hugging Face directory, read box by box."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# safetensors declares its files without types.

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from offbeat.models.loading import check_finite
from offbeat.plugins.megatron.errors import IncompleteWeights
from offbeat.plugins.megatron.fused_experts import fused_place, is_fused
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.trainers.checkpoints.weight_files import INDEX, SINGLE
from offbeat.weight_sync.region import Shape

NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


class HfWeights:
    """The tensors of a directory's safetensors files, read on demand."""

    def __init__(self, path: Path, opened: dict[str, Any], file_names: Mapping[str, str]) -> None:
        self._path, self._opened, self._file_names = path, opened, file_names
        self._fused: dict[str, Shape] = {
            name: tuple(handle.get_slice(name).get_shape())
            for name, handle in opened.items()
            if is_fused(name)
        }

    def read(self, box: TensorBox) -> Tensor:
        """Return the elements of a box, on the CPU, in the file's dtype.

        Raises:
            IncompleteWeights: The tensor is missing or has another shape.
        """
        name = self._file_names.get(box.tensor, box.tensor)
        fused = fused_place(name, box.whole, box.region, self._fused)
        if fused is not None:
            return fused.of(self._opened[fused.tensor].get_slice(fused.tensor)[fused.region.slices])
        if name not in self._opened:
            raise IncompleteWeights(str(self._path), box.tensor, "is missing")
        view = self._opened[name].get_slice(name)
        if tuple(view.get_shape()) != box.whole:
            problem = f"has shape {tuple(view.get_shape())}, not {box.whole}"
            raise IncompleteWeights(str(self._path), box.tensor, problem)
        return view[box.region.slices]


@contextmanager
def hf_weights(path: Path, file_names: Mapping[str, str] = NO_NAMES) -> Generator[HfWeights]:
    """Yield the weights of a directory while its files are open.

    ``file_names``: names in the files of tensors that have others there.
    """
    index = path / INDEX
    files = [SINGLE]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    with ExitStack() as stack:
        opened = dict[str, Any]()
        for file in files:
            if not (path / file).exists():
                raise IncompleteWeights(str(path), file, "is missing")
            handle = stack.enter_context(safe_open(path / file, framework="pt"))
            opened |= dict.fromkeys(handle.keys(), handle)
        yield HfWeights(path, opened, file_names)


@torch.no_grad()
def load_boxes(
    parameters: Mapping[str, Tensor],
    boxes: Sequence[TensorBox],
    path: Path,
    file_names: Mapping[str, str] = NO_NAMES,
) -> None:
    """Fill parameters from a Hugging Face directory; rows that pad the vocabulary become zero.

    Raises:
        IncompleteWeights: A tensor is missing or has another shape.
        WeightsNotFinite: A weight is NaN or infinite.
    """
    for each in parameters.values():
        each.zero_()
    with hf_weights(path, file_names) as weights:
        for box in boxes:
            filled = view_of(parameters, box).copy_(weights.read(box))
            check_finite(path, box.tensor, filled)


def view_of(parameters: Mapping[str, Tensor], box: TensorBox) -> Tensor:
    """Return a view of the box's elements in the local parameter that holds them."""
    return parameters[box.parameter][box.local.slices]
